// Threads that share loops.
//
// A loop is cut into chunks, and whoever is free claims the next one: the caller, who never waits
// for a thread that has not begun, and workers, which look for work for a while and then sleep.
// Who computes a chunk changes nothing in it.
//
// On a busy machine a thread is preempted now and then, until another process has had its turn,
// which takes milliseconds, and a loop takes microseconds. So whoever can only wait for a preempted
// thread gives it the core that it has itself: the caller to a worker within a chunk, and a worker
// to its caller. And a worker leaves its caller's core, where one would wait for the other.

#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#endif

// Of this library alone, should several be loaded.
namespace {

using Clock = std::chrono::steady_clock;
constexpr int JOBS = 8;                        // callers that can have help at once
constexpr int CREW = 255;                      // workers, at the most
constexpr int64_t LEAST = 1024, MOST = 32768;  // vector operations of a chunk
constexpr std::chrono::microseconds WAIT(30);  // before it is asked whether a thread was preempted
constexpr int PATIENCE = 32;                   // times to wait so long, before one sleeps
constexpr std::chrono::milliseconds LATE(5), SOON(10), LATER(1000);

// Rounds to nearest and keeps subnormal numbers, whatever the thread's own settings are.
class Arithmetic {
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();

  public:
    Arithmetic() { _mm_setcsr(0x1F80); }
    ~Arithmetic() { _mm_setcsr(before); }
#else
    uint64_t before;

  public:
    Arithmetic() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, xzr");
    }
    ~Arithmetic() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#endif
};

// Whether the condition came true in time.
template <class Condition>
bool spin(std::chrono::microseconds time, Condition condition) {
    Clock::time_point end;
    for (unsigned n = 0; !condition(); n++) {
        if (n == 32) end = Clock::now() + time;
        if (n > 32 && n % 32 == 0 && Clock::now() > end) return false;
#if defined(__x86_64__)
        _mm_pause();
#else
        asm volatile("isb");
#endif
    }
    return true;
}

// Threads and the cores that they run on. On other systems than Linux nothing is known of them.
#if defined(__linux__)
int core() { return sched_getcpu(); }
int this_thread() { return int(syscall(SYS_gettid)); }

// CPU time in nanoseconds.
int64_t ran(clockid_t clock) {
    timespec time = {};
    clock_gettime(clock, &time);
    return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

// Whether a thread's CPU time stands still while this one's does not.
bool stopped(int thread) {
    const clockid_t clock = clockid_t(~unsigned(thread) << 3 | 6);  // that of pthread_getcpuclockid
    const int64_t its = ran(clock), mine = ran(CLOCK_THREAD_CPUTIME_ID);
    spin(std::chrono::microseconds(10), [] { return false; });
    return ran(clock) - its < 3000 && ran(CLOCK_THREAD_CPUTIME_ID) - mine > 6000;
}

// Moves a thread to a core, or away from it, at once; afterwards it may run wherever it could. In
// between others see one core: whoever asks, forks or starts a thread then would keep it.
void migrate(int thread, int core, bool away) {
    cpu_set_t allowed, cores;
    if (sched_getaffinity(thread, sizeof allowed, &allowed)) return;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    if (away) CPU_XOR(&cores, &cores, &allowed);
    if (!sched_setaffinity(thread, sizeof cores, &cores))
        sched_setaffinity(thread, sizeof allowed, &allowed);
}
#else
int core() { return -1; }
int this_thread() { return -1; }
bool stopped(int) { return false; }
void migrate(int, int, bool) {}
#endif

// A caller's loop. What workers look at is not in one cache line with what changes.
struct alignas(64) Job {
    std::atomic<uint64_t> open{0};  // the loop's number << 32 | end of open chunks << 16 | first
    std::atomic<int> threads{0};    // that may work on it
    std::atomic<int> caller{0}, core{0};  // no caller, once it has gone its way
    std::atomic<bool> taken{false};
    alignas(64) std::atomic<int64_t> running{0};  // chunks that are not done
    std::atomic<bool> asleep{false};
    void (*body)(const void*, int64_t) = nullptr;
    const void* context = nullptr;

    // Claims the first open chunk, or the last, so that caller and worker each find in their cache
    // what they computed in the loop before. Until it is done, body and context stay.
    bool claim(bool first) {
        uint64_t seen = open.load(), chunk;
        do {
            chunk = first ? uint16_t(seen) : uint16_t(seen >> 16) - 1;
            if (uint16_t(seen) == uint16_t(seen >> 16)) return false;
        } while (!open.compare_exchange_weak(seen, first ? seen + 1 : seen - (1 << 16)));
        body(context, int64_t(chunk));
        return true;
    }
};

struct Worker {
    std::atomic<int> thread{0};
    std::atomic<const Job*> at{nullptr};  // of which it may have a chunk
};

// Never freed: workers look at jobs that are over.
struct Pool {
    Job jobs[JOBS];
    Worker crew[CREW + 1];  // from 1 on
    std::atomic<int> callers{0}, sleeping{0}, workers{0};
    std::atomic<bool> moving{false};  // a caller, to another core
    std::mutex lock;
    std::condition_variable wake, done;

    // Who had to wait long all the same goes on with one thread less: other processes need the core.
    // One more is tried soon, and if that fails again, later.
    std::atomic<int> places{INT_MAX};
    Clock::time_point again;
    Clock::duration pause = SOON;

    int room(int threads) {
        if (places >= threads) return threads;
        std::lock_guard<std::mutex> held(lock);
        if (Clock::now() > again) places++, again = Clock::now() + pause;
        return std::min<int>(places, threads);
    }
    void crowded(int threads) {
        const auto now = Clock::now();
        pause = now > again ? SOON : std::min<Clock::duration>(2 * pause, LATER);
        places = std::max(1, std::min<int>(places, threads) - 1);
        again = now + pause;
    }

    void help(Job& job, bool caller) {
        while (job.claim(caller))
            if (job.running.fetch_sub(1) == 1 && job.asleep.load()) {
                std::lock_guard<std::mutex> held(lock);
                done.notify_all();
            }
    }

    // A job with open chunks. Callers take the place of workers: all of them together are no more
    // than a loop may have threads.
    Job* look(int worker) {
        for (Job& job : jobs) {
            const uint64_t open = job.open.load();
            if (uint16_t(open) != uint16_t(open >> 16) && worker + callers <= job.threads)
                return &job;
        }
        return nullptr;
    }

    // One at a time: another would take the one core that a thread has meanwhile for all it may have.
    void give_core(int thread) {
        std::lock_guard<std::mutex> held(lock);
        migrate(thread, core(), false);
    }
    void leave_core(int thread) {
        std::lock_guard<std::mutex> held(lock);
        migrate(thread, core(), true);
    }

    // A caller on its way out either is seen to be gone or waits for its move to be over.
    void give_core_to_caller(const Job& job) {
        std::lock_guard<std::mutex> held(lock);
        moving = true;
        if (const int caller = job.caller) migrate(caller, core(), false);
        moving = false;
    }
    void dismiss(Job& job) {
        job.caller = 0;
        if (moving) std::lock_guard<std::mutex> held(lock);
        job.taken = false;
    }

    // Gives this core, which its thread is about to leave, to workers that were preempted within a
    // chunk of the job; whether there are any.
    bool rescue(const Job& job) {
        bool any = false;
        for (int n = 1; n <= workers; n++) {
            if (crew[n].at != &job || !stopped(crew[n].thread)) continue;
            give_core(crew[n].thread);
            any = true;
        }
        return any;
    }

    void work(int worker) {
        const Arithmetic arithmetic;
        Worker& me = crew[worker];
        me.thread = this_thread();
        Job *job = nullptr, *last = nullptr;
        for (int waits = 0;;) {
            if (spin(WAIT, [&] { return (job = look(worker)); })) {
                if (core() == job->core) leave_core(me.thread);
                me.at = last = job;
                help(*job, false);
                me.at = nullptr;
                waits = 0;
                continue;
            }
            const int caller = last ? last->caller.load() : 0;
            const bool preempted = caller && stopped(caller);
            if (!preempted && ++waits < PATIENCE) continue;
            if (preempted) give_core_to_caller(*last);
            waits = 0;
            std::unique_lock<std::mutex> held(lock);
            // Whoever opens a loop from now on sees `sleeping`; others have been seen here.
            sleeping++;
            if (!look(worker)) wake.wait(held);
            sleeping--;
        }
    }

    void begin(int threads) {
        if (workers >= threads - 1) return;
        std::lock_guard<std::mutex> held(lock);
        for (int worker = workers + 1; worker < std::min(threads, CREW + 1); worker++) try {
                std::thread([this, worker] { work(worker); }).detach();
                workers++;
            } catch (const std::system_error&) {
                return;  // the caller can do without
            }
    }

    // Threads do not survive a fork: the child has a pool of its own.
    static Pool*& shared() {
        static Pool* pool = [] {
            pthread_atfork(nullptr, nullptr, [] { shared() = new Pool; });
            return new Pool;
        }();
        return pool;
    }
};

// A caller, and the threads that it may have.
class Team {
    Pool& pool = *Pool::shared();
    const int threads;
    const Arithmetic arithmetic;
    Job* job = nullptr;

  public:
    explicit Team(int most) : threads(pool.room(most)) {
        pool.callers++;
        for (Job& one : pool.jobs)
            if (threads > 1 && !job && !one.taken.exchange(true)) job = &one;
        if (!job) return;
        pool.begin(threads);
        job->threads = threads;
        job->caller = this_thread();
    }
    ~Team() {
        pool.callers--;
        if (job) pool.dismiss(*job);
    }

    // body(n) for all n < count, each of about so many vector operations.
    template <class Body>
    void each(int64_t count, int64_t operations, const Body& body) {
        const int64_t all = count * operations, few = std::min<int64_t>(all / LEAST, threads);
        const int64_t many = (all / MOST + threads - 1) / threads * threads;  // equally many for each
        const int64_t chunks = std::min({count, std::max(many, few), int64_t(UINT16_MAX)});
        const auto chunk = [&](int64_t c) {
            for (int64_t n = c * count / chunks; n < (c + 1) * count / chunks; n++) body(n);
        };
        if (!job || chunks < 2) {
            for (int64_t n = 0; n < count; n++) body(n);
            return;
        }
        job->core.store(core(), std::memory_order_relaxed);
        job->body = [](const void* context, int64_t c) { (*(decltype(chunk)*)context)(c); };
        job->context = &chunk;
        job->running.store(chunks, std::memory_order_relaxed);
        job->open = ((job->open >> 32) + 1) << 32 | uint64_t(chunks) << 16;
        if (pool.sleeping && pool.callers < threads) {
            std::lock_guard<std::mutex> held(pool.lock);
            pool.wake.notify_all();
        }
        pool.help(*job, true);
        const auto over = [&] { return !job->running; };
        if (spin(WAIT, over)) return;
        const auto begun = Clock::now();
        for (int waits = 1; !pool.rescue(*job) && waits < PATIENCE; waits++)
            if (spin(WAIT, over)) return;
        std::unique_lock<std::mutex> held(pool.lock);
        job->asleep = true;
        pool.done.wait(held, over);
        job->asleep = false;
        if (Clock::now() > begun + LATE) pool.crowded(threads);
    }
};

}  // namespace
