// Attention within sequences that lie end to end, in float32, forwards and backwards.
//
//     P = softmax(β Q Kᵀ) over the keys that each query sees,    O = P V
//     dV = Pᵀ dO,    dP = dO Vᵀ,    dS = β P ∘ (dP - Σ P ∘ dP),    dQ = dS K,    dK = dSᵀ Q
//
// Every token is read and written where it lies. A sequence's keys are its own, so that each
// sequence and key head is a piece of work that no other depends on: the number of threads changes
// no bit. Weights are computed again on the way back, from the logarithm of each row's sum.

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "openmp.h"
#include "simd.h"
#include "tokens.h"

constexpr int64_t BLOCK = 4 * ROWS;  // queries whose weights are in the cache together

extern "C" {

struct Sequences {
    int64_t count, heads, key_heads, key_width, value_width;  // widths are multiples of 16
    double beta;
    const int32_t *queries, *keys;  // offsets of each sequence, and the total last
    const int32_t *first, *last;    // each query's range of keys; it sees none where last <= first
    float* logsum;                  // (heads, queries)
};
}

namespace {

INLINE int64_t up(int64_t n) { return (n + 15) / 16 * 16; }

INLINE void fill(float* x, int64_t begin, int64_t end, float value) {
    for (int64_t j = begin; j < end; j++) x[j] = value;
}

// A matrix within another: element (i, k) is data[i row + k step].
struct Matrix {
    const float* data;
    int64_t row, step;
};

template <int R, int G>
INLINE void tile(Matrix a, int64_t depth, const float* b, int64_t b_row, float* c, int64_t c_row,
                 bool add) {
    Floats sums[R][G];
    for (int r = 0; r < R; r++)
        for (int g = 0; g < G; g++) sums[r][g] = add ? load(c + r * c_row + 16 * g) : all(0.0f);
    for (int64_t k = 0; k < depth; k++) {
        Floats row[G];
        for (int g = 0; g < G; g++) row[g] = load(b + k * b_row + 16 * g);
        for (int r = 0; r < R; r++) {
            const Floats x = all(a.data[r * a.row + k * a.step]);
            for (int g = 0; g < G; g++) sums[r][g] = fma(x, row[g], sums[r][g]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int g = 0; g < G; g++) store(sums[r][g], c + r * c_row + 16 * g);
}

template <int R>
void strip(Matrix a, int64_t depth, const float* b, int64_t b_row, int64_t columns, float* c,
           int64_t c_row, bool add) {
    int64_t j = 0;
    for (; j + 16 * GROUPS <= columns; j += 16 * GROUPS)
        tile<R, GROUPS>(a, depth, b + j, b_row, c + j, c_row, add);
    for (; j < columns; j += 16) tile<R, 1>(a, depth, b + j, b_row, c + j, c_row, add);
}

// c = a b, or c += a b, for so many rows of a and columns of b, which are a multiple of 16.
void product(Matrix a, int64_t rows, int64_t depth, const float* b, int64_t b_row, int64_t columns,
             float* c, int64_t c_row, bool add) {
    int64_t i = 0;
    const auto next = [&](auto strip, int64_t n) {
        const Matrix from{a.data + i * a.row, a.row, a.step};
        strip(from, depth, b, b_row, columns, c + i * c_row, c_row, add);
        i += n;
    };
    while (i + ROWS <= rows) next(strip<ROWS>, ROWS);
    if (rows - i >= 4) next(strip<4>, 4);
    if (rows - i >= 2) next(strip<2>, 2);
    if (rows - i >= 1) next(strip<1>, 1);
}

// Columns of y (width, up(count)) are rows of x, times a factor; those that fill up are zero.
void transpose(const float* x, int64_t row, int64_t count, int64_t width, float factor,
               std::vector<float>& y) {
    const int64_t columns = up(count);
    y.resize(size_t(columns * width));
    for (int64_t k = 0; k < width; k += 16) {
        for (int64_t j = 0; j < count; j++)
            for (int64_t i = k; i < k + 16; i++) y[i * columns + j] = factor * x[j * row + i];
        for (int64_t i = k; i < k + 16; i++) fill(&y[i * columns], count, columns, 0.0f);
    }
}

float* at(const Tokens& x, int64_t token, int64_t head) {
    return x.data + token * x.token + head * x.head;
}

// A piece of work: the queries of some heads, and the one head of keys and values they share.
struct Piece {
    const Sequences& of;
    int64_t begin, rows, key, keys, columns;

    Piece(const Sequences& of, int64_t sequence)
        : of(of), begin(of.queries[sequence]), rows(of.queries[sequence + 1] - begin),
          key(of.keys[sequence]), keys(of.keys[sequence + 1] - key), columns(up(keys)) {}

    // The range of a query, counted from the sequence's first key.
    int64_t first(int64_t row) const { return std::max<int64_t>(0, of.first[begin + row] - key); }
    int64_t last(int64_t row) const { return std::min(keys, of.last[begin + row] - key); }
};

// Rows of a piece, and the keys that any of them sees, from a multiple of 16 up to one.
struct Block {
    int64_t row, rows, from, to;

    Block(const Piece& piece, int64_t row) : row(row), rows(std::min(BLOCK, piece.rows - row)) {
        from = piece.keys, to = 0;
        for (int64_t i = row; i < row + rows; i++) {
            if (piece.first(i) >= piece.last(i)) continue;
            from = std::min(from, piece.first(i));
            to = std::max(to, piece.last(i));
        }
        from = from / 16 * 16;
        to = std::max(from, up(to));
    }
};

// β q kᵀ of a block's rows.
void scores(const Piece& piece, const Block& block, const Tokens& query, int64_t head,
            const std::vector<float>& keys, float* into) {
    const Matrix rows{at(query, piece.begin + block.row, head), query.token, 1};
    product(rows, block.rows, piece.of.key_width, keys.data() + block.from, piece.columns,
            block.to - block.from, into + block.from, piece.columns, false);
}

// e^(s - shift) for one row, 0 for keys that it does not see; their sum.
float weigh(float* row, int64_t from, int64_t to, int64_t first, int64_t last, float shift) {
    Floats total = all(0.0f);
    for (int64_t j = from; j < to; j += 16)
        store(exponential(load(row + j) - all(shift)), row + j);
    fill(row, from, first, 0.0f);
    fill(row, last, to, 0.0f);
    for (int64_t j = from; j < to; j += 16) total = total + load(row + j);
    return sum(total);
}

// Scores of one row become weights; gives the logarithm of their sum.
float softmax(float* row, int64_t from, int64_t to, int64_t first, int64_t last) {
    if (first >= last) {
        fill(row, from, to, 0.0f);
        return -std::numeric_limits<float>::infinity();
    }
    Floats best = all(-FLT_MAX);
    fill(row, from, first, -FLT_MAX);
    fill(row, last, to, -FLT_MAX);
    for (int64_t j = from; j < to; j += 16) best = larger(best, load(row + j));
    const float shift = most(best), total = weigh(row, from, to, first, last, shift);
    const Floats by = all(1.0f / total);
    for (int64_t j = from; j < to; j += 16) store(load(row + j) * by, row + j);
    return shift + std::log(total);
}

struct Room {
    std::vector<float> keys, values, weights, slopes;
};
thread_local Room room;

void forward(const Sequences& of, const Piece& piece, int64_t group, const Tokens& query,
             const Tokens& key, const Tokens& value, const Tokens& out) {
    const int64_t each = of.heads / of.key_heads, all_rows = of.queries[of.count];
    transpose(at(key, piece.key, group), key.token, piece.keys, of.key_width,
              float(of.beta), room.keys);
    room.weights.resize(size_t(BLOCK * piece.columns));
    for (int64_t head = group * each; head < (group + 1) * each; head++)
        for (int64_t row = 0; row < piece.rows; row += BLOCK) {
            const Block block(piece, row);
            float* weights = room.weights.data();
            scores(piece, block, query, head, room.keys, weights);
            for (int64_t i = 0; i < block.rows; i++)
                of.logsum[head * all_rows + piece.begin + row + i] =
                    softmax(weights + i * piece.columns, block.from, block.to,
                            piece.first(row + i), piece.last(row + i));
            const int64_t seen = std::min(block.to, piece.keys) - block.from;
            product({weights + block.from, piece.columns, 1}, block.rows, seen,
                    at(value, piece.key + block.from, group), value.token, of.value_width,
                    at(out, piece.begin + row, head), out.token, false);
        }
}

void backward(const Sequences& of, const Piece& piece, int64_t group, const Tokens& query,
              const Tokens& key, const Tokens& value, const Tokens& above, const Tokens& to_query,
              const Tokens& to_key, const Tokens& to_value) {
    const int64_t each = of.heads / of.key_heads, all_rows = of.queries[of.count];
    const int64_t columns = piece.columns;
    transpose(at(key, piece.key, group), key.token, piece.keys, of.key_width,
              float(of.beta), room.keys);
    transpose(at(value, piece.key, group), value.token, piece.keys, of.value_width,
              1.0f, room.values);
    room.weights.resize(size_t(BLOCK * columns));
    room.slopes.resize(size_t(BLOCK * columns));
    for (int64_t j = 0; j < piece.keys; j++) {
        fill(at(to_key, piece.key + j, group), 0, of.key_width, 0.0f);
        fill(at(to_value, piece.key + j, group), 0, of.value_width, 0.0f);
    }
    float *weights = room.weights.data(), *slopes = room.slopes.data();
    for (int64_t head = group * each; head < (group + 1) * each; head++)
        for (int64_t row = 0; row < piece.rows; row += BLOCK) {
            const Block block(piece, row);
            const int64_t token = piece.begin + row, from = block.from, to = block.to;
            const int64_t seen = std::min(to, piece.keys) - from;
            const float* grad = at(above, token, head);
            scores(piece, block, query, head, room.keys, weights);
            product({grad, above.token, 1}, block.rows, of.value_width, room.values.data() + from,
                    columns, to - from, slopes + from, columns, false);
            for (int64_t i = 0; i < block.rows; i++) {
                float *p = weights + i * columns, *s = slopes + i * columns;
                const int64_t first = piece.first(row + i), last = piece.last(row + i);
                const float logsum = of.logsum[head * all_rows + token + i];
                if (first >= last)
                    fill(p, from, to, 0.0f);
                else
                    weigh(p, from, to, first, last, logsum);
                Floats mean = all(0.0f);
                for (int64_t j = from; j < to; j += 16) mean = fma(load(p + j), load(s + j), mean);
                const Floats center = all(sum(mean)), beta = all(float(of.beta));
                for (int64_t j = from; j < to; j += 16)
                    store(beta * load(p + j) * (load(s + j) - center), s + j);
            }
            product({slopes + from, columns, 1}, block.rows, seen,
                    at(key, piece.key + from, group), key.token, of.key_width,
                    at(to_query, token, head), to_query.token, false);
            product({slopes + from, 1, columns}, seen, block.rows, at(query, token, head),
                    query.token, of.key_width, at(to_key, piece.key + from, group),
                    to_key.token, true);
            product({weights + from, 1, columns}, seen, block.rows, grad, above.token,
                    of.value_width, at(to_value, piece.key + from, group), to_value.token,
                    true);
        }
}

}  // namespace

extern "C" {

void attend(const Sequences* of, const Tokens* query, const Tokens* key, const Tokens* value,
            const Tokens* out, int threads) {
    share(of->count * of->key_heads, threads, [&](int64_t n) {
        const Piece piece(*of, n / of->key_heads);
        forward(*of, piece, n % of->key_heads, *query, *key, *value, *out);
    });
}

void attend_backward(const Sequences* of, const Tokens* query, const Tokens* key,
                     const Tokens* value, const Tokens* above, const Tokens* to_query,
                     const Tokens* to_key, const Tokens* to_value, int threads) {
    share(of->count * of->key_heads, threads, [&](int64_t n) {
        const Piece piece(*of, n / of->key_heads);
        backward(*of, piece, n % of->key_heads, *query, *key, *value, *above, *to_query, *to_key,
                 *to_value);
    });
}
}
