// Threads that share loops.
//
// A loop is cut into chunks, and whoever is free claims the next one: the caller, who never waits
// for a thread that has not begun, and workers, which look for work for a while and then sleep.
// Which thread computes a chunk changes nothing in it.

#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pool {

constexpr int JOBS = 16;         // callers that can have help at once
constexpr int64_t LEAST = 4096, MOST = 32768;  // vector operations of a chunk
constexpr std::chrono::microseconds LOOK(200), WAIT(100);  // before a worker sleeps, or a caller

// A caller's loop. Jobs are never freed: a worker may look at one that is over.
struct alignas(128) Job {
    std::atomic<uint64_t> open{0};    // the loop's number << 32 | chunks that nobody has claimed
    std::atomic<int64_t> running{0};  // chunks that are not done
    std::atomic<int> threads{0};      // that may work on it
    std::atomic<bool> taken{false}, asleep{false};
    void (*body)(const void*, int64_t) = nullptr;
    const void* context = nullptr;
};

struct Pool {
    Job jobs[JOBS];
    std::atomic<int> callers{0}, sleeping{0}, workers{0};
    std::mutex lock;
    std::condition_variable wake, done;

    // Claims chunks while there are any. A loop cannot end before a claimed chunk is done, so body
    // and context are those of the loop from which it was claimed.
    void help(Job& job) {
        uint64_t open = job.open.load();
        while (uint32_t(open)) {
            if (!job.open.compare_exchange_weak(open, open - 1)) continue;
            job.body(job.context, int64_t(uint32_t(open)) - 1);
            if (job.running.fetch_sub(1) == 1 && job.asleep.load()) {
                std::lock_guard<std::mutex> held(lock);
                done.notify_all();
            }
            open = job.open.load();
        }
    }

    // Callers take the place of workers: all together are as many as a loop may have threads.
    bool wanted(int worker, const Job& job) {
        return uint32_t(job.open.load()) && worker + callers.load() <= job.threads.load();
    }

    void work(int worker);
    void begin(int threads);
};

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

// Whether the condition came true in time.
template <class Condition>
bool spin(std::chrono::microseconds time, Condition condition) {
    const auto end = std::chrono::steady_clock::now() + time;
    do {
        for (int n = 0; n < 32; n++) {
            if (condition()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// Rounds to nearest and keeps subnormal numbers, whatever a thread's settings were.
class Arithmetic {
  public:
#if defined(__x86_64__)
    Arithmetic() : before(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~Arithmetic() { _mm_setcsr(before); }

  private:
    unsigned before;
#elif defined(__aarch64__)
    Arithmetic() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
    }
    ~Arithmetic() { asm volatile("msr fpcr, %0" : : "r"(before)); }

  private:
    uint64_t before;
#endif
};

inline void Pool::work(int worker) {
    const Arithmetic arithmetic;
    const auto look = [&] {
        return std::find_if(jobs, jobs + JOBS, [&](Job& job) { return wanted(worker, job); });
    };
    while (true) {
        Job* found = jobs + JOBS;
        while (spin(LOOK, [&] { return (found = look()) != jobs + JOBS; })) help(*found);
        std::unique_lock<std::mutex> held(lock);
        // Whoever opens a loop now sees `sleeping`; one that was opened before is seen here.
        sleeping++;
        if (look() == jobs + JOBS) wake.wait(held);
        sleeping--;
    }
}

inline void Pool::begin(int threads) {
    if (workers.load() >= threads - 1) return;
    std::lock_guard<std::mutex> held(lock);
    for (int n = workers.load() + 1; n < threads; n++) {
        std::thread([this, n] { work(n); }).detach();
        workers++;
    }
}

// Threads do not survive a fork: the child starts with a pool of its own.
inline Pool*& shared() {
    static Pool* pool = [] {
        pthread_atfork(nullptr, nullptr, [] { shared() = new Pool; });
        return new Pool;
    }();
    return pool;
}

// A caller, and the threads that it may have.
class Team {
  public:
    explicit Team(int threads) : pool(*shared()), threads(threads) {
        pool.callers++;
        for (Job& one : pool.jobs)
            if (threads > 1 && !job && !one.taken.exchange(true)) job = &one;
        if (!job) return;
        pool.begin(threads);
        job->threads = threads;
    }
    ~Team() {
        pool.callers--;
        if (job) job->taken = false;
    }
    Team(const Team&) = delete;

    // body(n) for all n < count, each of about so many vector operations.
    template <class Body>
    void each(int64_t count, int64_t operations, const Body& body) {
        const int64_t all = count * operations;
        const int64_t chunks =
            std::min(count, std::max(all / MOST, std::min<int64_t>(all / LEAST, threads)));
        auto chunk = [&](int64_t c) {
            for (int64_t n = c * count / chunks; n < (c + 1) * count / chunks; n++) body(n);
        };
        if (!job || chunks < 2) {
            for (int64_t n = 0; n < count; n++) body(n);
            return;
        }
        job->body = [](const void* context, int64_t c) { (*(decltype(chunk)*)context)(c); };
        job->context = &chunk;
        job->running = chunks;
        job->open = ((job->open >> 32) + 1) << 32 | chunks;
        if (pool.sleeping.load() && pool.callers.load() < threads) {
            std::lock_guard<std::mutex> held(pool.lock);
            pool.wake.notify_all();
        }
        pool.help(*job);
        const auto over = [&] { return !job->running.load(); };
        if (spin(WAIT, over)) return;
        std::unique_lock<std::mutex> held(pool.lock);
        job->asleep = true;
        pool.done.wait(held, over);
        job->asleep = false;
    }

  private:
    Pool& pool;
    const int threads;
    Job* job = nullptr;
    const Arithmetic arithmetic;
};

}  // namespace pool
