// RotaryEmbedding positions: pairs of columns rotate by an angle that grows with the token's position.
//
//     (a, b) -> (a cos - b sin, a sin + b cos)        backwards by the opposite angle

#include <cstdint>

#include "openmp.h"
#include "tokens.h"

extern "C" {

struct Rotation {
    int64_t tokens, heads, width, pairs;  // columns beyond the pairs stay as they are
    int64_t halves;                       // column k pairs with k + pairs, and else 2k with 2k + 1
    double sign;                          // of the angle
    const float* table;                   // cos and sin, (positions, 2, pairs)
    const int64_t* position;              // of each token
};
}

namespace {

// STEP columns from one pair to the next, whose two are OTHER apart.
template <int STEP>
void rotated(const float* x, float* y, const float* cos, const float* sin, int64_t pairs,
            int64_t other, float sign) {
    for (int64_t k = 0; k < pairs; k++) {
        const float a = x[k * STEP], b = x[k * STEP + other], s = sign * sin[k];
        y[k * STEP] = a * cos[k] - b * s;
        y[k * STEP + other] = a * s + b * cos[k];
    }
}

}  // namespace

extern "C" {

void rotate(const Rotation* by, const Tokens* from, const Tokens* to, int threads) {
    share(by->tokens, threads, [&](int64_t token) {
        const float* cos = by->table + by->position[token] * 2 * by->pairs;
        const float *x = from->data + token * from->token, *sin = cos + by->pairs;
        float* y = to->data + token * to->token;
        for (int64_t head = 0; head < by->heads; head++, x += from->head, y += to->head) {
            if (by->halves)
                rotated<1>(x, y, cos, sin, by->pairs, by->pairs, float(by->sign));
            else
                rotated<2>(x, y, cos, sin, by->pairs, 1, float(by->sign));
            for (int64_t i = 2 * by->pairs; i < by->width; i++) y[i] = x[i];
        }
    });
}
}
