// Loops that share the threads of torch's own operations.
//
// A second set of threads would compete with the first for the cores: each waits for its next loop
// by spinning. So loops run in the OpenMP runtime that torch has loaded, which is asked for by name:
// GOMP_parallel is GCC's, and LLVM's and Intel's runtimes have it too. Where there is none, the
// caller does everything.

#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace {

constexpr int64_t TURNS = 16;  // times that a thread claims work, if all are equally fast

// body(n) for all n < count, whoever is free taking the next few. Who computes which changes nothing.
template <class Body>
void share(int64_t count, int threads, const Body& body) {
    using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
    static const auto parallel = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    std::atomic<int64_t> next{0};
    const int64_t few = std::max<int64_t>(1, count / (TURNS * std::max(1, threads)));
    const auto work = [&] {
        for (int64_t begin; (begin = next.fetch_add(few)) < count;)
            for (int64_t n = begin; n < std::min(begin + few, count); n++) body(n);
    };
    if (!parallel || threads < 2 || count < 2) return work();
    parallel([](void* shared) { (*(decltype(work)*)shared)(); }, (void*)&work, unsigned(threads), 0);
}

}  // namespace
