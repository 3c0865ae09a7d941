// Cross-entropy over a vocabulary, with label smoothing ε, and its gradient in the logits' place.
//
//     log Σ e^x - (1 - ε) x_target - ε/N Σ x        gradient p - q, p = softmax(x)
//
// A row stays in the cache while it is read three times.

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "openmp.h"
#include "simd.h"

namespace {

// Logits x of one row become their gradient; gives the loss.
float differentiate(float* x, const float* bias, int64_t n, int64_t target, float smoothing) {
    if (target < 0) {
        for (int64_t i = 0; i < n; i++) x[i] = 0.0f;
        return 0.0f;
    }
    Floats best = all(-FLT_MAX), plain = all(0.0f), total = all(0.0f);
    sweep(n, [&](int64_t i, int64_t left) {
        Floats logits = load(x + i, left);
        if (bias) store(logits = logits + load(bias + i, left), x + i, left);
        best = larger(best, keep(logits, left, -FLT_MAX));
        plain = plain + logits;
    });
    const float peak = most(best), at_target = x[target], uniform = smoothing / float(n);
    sweep(n, [&](int64_t i, int64_t left) {
        const Floats raised = exponential(load(x + i, left) - all(peak));
        store(raised, x + i, left);
        total = total + keep(raised, left, 0.0f);
    });
    const float whole = sum(total);
    const Floats by = all(1.0f / whole), less = all(-uniform);
    sweep(n, [&](int64_t i, int64_t left) {
        store(fma(load(x + i, left), by, less), x + i, left);
    });
    x[target] -= 1.0f - smoothing;
    return peak + std::log(whole) - (1.0f - smoothing) * at_target - uniform * sum(plain);
}

}  // namespace

extern "C" {

// Rows with a negative target count nothing.
void losses(float* logits, const float* bias, const int64_t* targets, float* found, int64_t rows,
            int64_t columns, double smoothing, int threads) {
    share(rows, threads, [&](int64_t row) {
        found[row] = differentiate(logits + row * columns, bias, columns, targets[row],
                                   float(smoothing));
    });
}
}
