// Transformer stacks with 8-bit weights, and what a search asks of logits.
//
//     y_rn = s_r t_n Σ_k q_rk w_nk + b_n        q, w integers from -127 to 127
//
// s_r = max |x_r| / 127 is row r's own scale, and t_n that of row n of the weights: a row does not
// depend on what else is in its batch. The integers' sums are exact: they may wrap around on the
// way, and end within 32 bits (linear.py sees to it). All else is float32, but the KV cache, which
// holds IEEE halves. NaNs propagate.
//
// Tokens are rows of one matrix, without padding. What a token attends to is a list of slots of the
// KV cache, so that reordering beams moves no keys or values.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "pool.h"
#include "simd.h"

extern "C" {

// How weights are packed: outputs and inputs that are read together, and activations' offset.
int64_t columns = 16 * GROUPS, depth = DEPTH, offset = OFFSET;

struct Linear {
    int64_t in, out;
    // All padded to a multiple of columns, and of depth.
    const int8_t* weight;   // (out / columns, in / depth, columns, depth)
    const int32_t* start;   // -offset Σ_k w_nk
    const float *scale, *bias;
};

struct Norm {
    const float *gain, *bias;  // null where there is no LayerNorm
    double epsilon;
};

struct Attention {
    int64_t heads, key_heads, key_width, value_width;
    double beta;
    Linear query, key, value, output;
};

struct Block {
    Attention self, cross;
    Linear expand, gate, reduce;
    Norm self_norm, cross_norm, feed_forward_norm;
    int64_t has_cross, pre_norm, activation, gated;
};

struct Rotary {
    const float* table;  // cos and sin, (positions, 2, pairs), or null
    int64_t pairs, halves;
};

// Keys and values of every block, and for each sequence the slots that hold its own.
struct Cache {
    uint16_t* data;  // (blocks, slots, keys and values)
    int64_t slots;
    const int32_t* table;  // (sequences, width)
    int64_t width;
    const int64_t* count;
};

// x_t = scale table[id_t] + place[position_t]
struct Embedding {
    const int64_t* id;
    const float *table, *place;  // table is null where vectors are given; place may be null
    double scale;
};

struct Tokens {
    int64_t count, width, causal;
    float* x;  // (count, width), becomes the result; null where nobody wants it
    const int64_t *sequence, *position;
    Embedding embedding;
    Rotary rotary;
    Cache self, memory;
};
}

namespace {

using pool::Team;

enum { NONE, RELU, GELU, SILU };

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

INLINE Floats polynomial(Floats x, std::initializer_list<float> coefficients) {
    Floats y = all(0.0f);
    for (float c : coefficients) y = fma(y, x, all(c));
    return y;
}

// e^x = 2^n e^r with |r| <= ln 2 / 2, and a polynomial for e^r (Cephes).
INLINE Floats exponential(Floats x) {
    x = larger(all(-87.0f), smaller(all(88.0f), x));
    const Floats n = nearest(x * all(1.44269504f));
    const Floats r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x));
    const Floats p = polynomial(r, {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                    4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f});
    return (fma(p, r * r, r) + all(1.0f)) * as_floats((integers(n) + all(127)) << 23);
}

// x Φ(x), from erfc(t) = e^(-t p(t)) with t = |x| / √2, to 3e-7.
INLINE Floats gelu(Floats x) {
    const Floats size = larger(x, all(0.0f) - x), t = smaller(all(5.0f), size * all(0.70710678f));
    const Floats p = polynomial(
        t, {2.62370577e-07f, -6.59261104e-06f, 6.96470524e-05f, -0.000388756511f, 0.00105406437f,
            0.000689729815f, -0.0198103599f, 0.103046201f, 0.636568964f, 1.12838221f});
    const Floats tail = all(0.5f) * exponential((all(0.0f) - t) * p);
    return x * where_less(x, all(0.0f), tail, all(1.0f) - tail);
}

INLINE Floats activate(Floats x, int64_t kind) {
    switch (kind) {
        case RELU: return larger(all(0.0f), x);
        case GELU: return gelu(x);
        case SILU: return x / (exponential(all(0.0f) - x) + all(1.0f));
        default: return x;
    }
}

// What a caller's threads hand each other; kept from call to call.
struct Work {
    std::vector<Activation> q;
    std::vector<float> scale, wide, out, heads, x;

    static Work& of(int64_t rows, int64_t width, int64_t heads) {
        static thread_local Work work;
        const auto reserve = [](auto& some, int64_t n) {
            if (int64_t(some.size()) < n) some.resize(n);
        };
        reserve(work.q, rows * up(std::max(width, heads), 16));
        reserve(work.scale, rows);
        reserve(work.wide, rows * width);
        reserve(work.out, rows * width);
        reserve(work.heads, rows * heads);
        return work;
    }

    // q = round(127 x / max |x|)
    void quantize(const float* x, int64_t width, int64_t row) {
        // Bits of floats without signs are ordered as the floats are, and NaN's come last: a NaN
        // becomes the scale.
        Ints most = all(0);
        sweep(width, [&](int64_t i, int64_t left) {
            most = larger(most, bits(load(x + i, left)) & all(0x7FFFFFFF));
        });
        float lane[16];
        store(as_floats(most), lane);
        const auto last = [](float a, float b) { return load<int32_t>(&a) < load<int32_t>(&b); };
        const float largest = *std::max_element(lane, lane + 16, last);
        scale[row] = largest <= FLT_MAX ? largest / 127.0f : NAN;
        const Floats by = all(largest > 0 ? std::min(127.0f / largest, FLT_MAX) : 0.0f);
        Activation* to = q.data() + row * up(width, 16);
        sweep(width, [&](int64_t i, int64_t left) {
            narrow(integers(load(x + i, left) * by) + all(OFFSET), to + i);
        });
    }

    void quantize_all(Team& team, const float* x, int64_t rows, int64_t width) {
        team.each(rows, width / 4, [&](int64_t r) { quantize(x + r * width, width, r); });
    }
};

template <int M>
void tile(const Linear& linear, int64_t n, const Activation* q, const float* scale, float* y,
          int64_t stride) {
    constexpr int N = GROUPS * PARTS;
    const int64_t inputs = up(linear.in, DEPTH), row = up(linear.in, 16);
    const int8_t* w = linear.weight + n * inputs;
    W sum[M][N], column[N];
    for (int m = 0; m < M; m++)
        for (int i = 0; i < N; i++) sum[m][i] = load<W>(linear.start + n + i * LANES);
    for (int64_t k = 0; k < inputs; k += DEPTH, w += 16 * GROUPS * DEPTH) {
        for (int i = 0; i < N; i++) column[i] = weights(w + i * LANES * DEPTH);
        for (int m = 0; m < M; m++) {
            const W x = load<int32_t>(q + m * row + k) - W{};
            for (int i = 0; i < N; i++) sum[m][i] = dot(sum[m][i], x, column[i]);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++) {
            const int64_t at = n + 16 * g;
            Ints sums;
            for (int p = 0; p < PARTS; p++) sums.part[p] = sum[m][g * PARTS + p];
            const Floats t = load(linear.scale + at) * all(scale[m]);
            store(fma(floats(sums), t, load(linear.bias + at)), y + m * stride + at,
                  linear.out - at);
        }
}

// As many rows as there are, M at a time. The weights stay in the cache while rows pass by.
template <int M>
void tiles(const Linear& linear, int64_t n, int64_t rows, const Activation* q, const float* scale,
           float* y, int64_t stride) {
    for (; rows >= M; rows -= M, q += M * up(linear.in, 16), scale += M, y += M * stride)
        tile<M>(linear, n, q, scale, y, stride);
    if constexpr (M > 1)
        if (rows) tiles<M - 1>(linear, n, rows, q, scale, y, stride);
}

// Products of the quantized rows with several matrices, side by side.
void multiply(Team& team, std::initializer_list<const Linear*> matrices, int64_t rows,
              const Work& work, float* y, int64_t stride) {
    constexpr int64_t SHARE = 16 * ROWS;  // so many rows at a time, for threads to have equal shares
    const int64_t in = (*matrices.begin())->in, shares = up(rows, SHARE) / SHARE;
    int64_t blocks = 0;
    for (const Linear* one : matrices) blocks += up(one->out, columns) / columns;
    team.each(blocks * shares, std::min(rows, SHARE) * in / DEPTH * PARTS * GROUPS, [&](int64_t i) {
        const int64_t row = i % shares * SHARE, count = std::min(rows - row, SHARE);
        int64_t n = i / shares * columns;
        float* to = y + row * stride;
        for (const Linear* one : matrices) {
            if (n < one->out)
                return tiles<ROWS>(*one, n, count, &work.q[row * up(in, 16)], &work.scale[row], to,
                                   stride);
            n -= up(one->out, columns);
            to += one->out;
        }
    });
}

void normalize(const Norm& norm, const float* x, int64_t n, float* y) {
    Floats total = all(0.0f), square = all(0.0f);
    sweep(n, [&](int64_t i, int64_t left) { total = total + load(x + i, left); });
    const Floats mean = all(sum(total) / float(n));
    sweep(n, [&](int64_t i, int64_t left) {
        const Floats d = keep(load(x + i, left) - mean, left, 0.0f);
        square = fma(d, d, square);
    });
    const Floats by = all(1.0f / std::sqrt(sum(square) / float(n) + float(norm.epsilon)));
    sweep(n, [&](int64_t i, int64_t left) {
        const Floats d = (load(x + i, left) - mean) * by;
        store(fma(d, load(norm.gain + i, left), load(norm.bias + i, left)), y + i, left);
    });
}

void embed(Team& team, const Tokens& at) {
    const Embedding& e = at.embedding;
    const float scale = float(e.scale);
    team.each(at.count, at.width / 8, [&](int64_t t) {
        const float* row = e.table + e.id[t] * at.width;
        const float* place = e.place ? e.place + at.position[t] * at.width : nullptr;
        float* x = at.x + t * at.width;
        for (int64_t i = 0; i < at.width; i++) x[i] = row[i] * scale;
        for (int64_t i = 0; place && i < at.width; i++) x[i] += place[i];
    });
}

// x += y, this sublayer's LayerNorm (post) or the next one's (pre), and the result quantized.
void residual(Team& team, const Tokens& at, const float* y, const Norm* post, const Norm* pre,
              Work& work) {
    const int64_t width = at.width;
    team.each(at.count, width, [&](int64_t t) {
        float *x = at.x + t * width, *normalized = work.out.data() + t * width;  // y has been read
        if (y)
            for (int64_t i = 0; i < width; i++) x[i] += y[t * width + i];
        if (post && post->gain) normalize(*post, x, width, x);
        if (pre && pre->gain) normalize(*pre, x, width, normalized);
        work.quantize(pre && pre->gain ? normalized : x, width, t);
    });
}

void rotate(const Rotary& rotary, int64_t position, float* x, int64_t heads, int64_t width) {
    const int64_t pairs = rotary.pairs, step = rotary.halves ? 1 : 2;
    const int64_t other = rotary.halves ? pairs : 1;
    const float *cos = rotary.table + position * 2 * pairs, *sin = cos + pairs;
    for (int64_t h = 0; h < heads; h++, x += width)
        for (int64_t i = 0; i < pairs; i++) {
            float &a = x[i * step], &b = x[i * step + other];
            const float turned = a * cos[i] - b * sin[i];
            b = a * sin[i] + b * cos[i];
            a = turned;
        }
}

// Each head is padded to a multiple of 16. What is too large for 16 bits stays finite.
void store_halves(const float* x, int64_t heads, int64_t width, uint16_t* y) {
    for (; heads; heads--, x += width, y += up(width, 16))
        sweep(width, [&](int64_t i, int64_t left) {
            const Floats v = smaller(all(65504.0f), load(x + i, left));
            narrow(larger(all(-65504.0f), v), y + i);
        });
}

// Keys of all heads and then their values, as they lie in a slot.
struct Layout {
    int64_t key, value, slot;
    explicit Layout(const Attention& a)
        : key(up(a.key_width, 16)),
          value(up(a.value_width, 16)),
          slot(a.key_heads * (key + value)) {}
    void store(const Attention& a, const float* x, uint16_t* to) const {
        store_halves(x, a.key_heads, a.key_width, to);
        store_halves(x + a.key.out, a.key_heads, a.value_width, to + a.key_heads * key);
    }
};

// One query over `count` keys: softmax(beta q·k) v.
void attend(const Attention& a, const Layout& layout, const float* query, const uint16_t* data,
            int64_t head, const int32_t* slot, int64_t count, float* out) {
    static thread_local std::vector<float> room;
    if (int64_t(room.size()) < layout.key + count + 16) room.resize(layout.key + 2 * count + 16);
    float *q = room.data(), *score = q + layout.key;
    const uint16_t *key = data + head * layout.key;
    const uint16_t *value = data + a.key_heads * layout.key + head * layout.value;
    sweep(a.key_width, [&](int64_t i, int64_t left) {
        store(load(query + i, left) * all(float(a.beta)), q + i);
    });
    for (int64_t s = 0; s < count; s += 4) {
        Floats products[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
        const uint16_t* k[4];
        for (int c = 0; c < 4; c++) k[c] = key + slot[std::min(s + c, count - 1)] * layout.slot;
        for (int64_t i = 0; i < layout.key; i += 16) {
            const Floats x = load(q + i);
            for (int c = 0; c < 4; c++) products[c] = fma(x, widen(k[c] + i), products[c]);
        }
        const Quarter four = sums(products);
        std::memcpy(score + s, &four, sizeof four);
    }
    Floats high = all(-INFINITY), total = all(0.0f);
    sweep(count, [&](int64_t s, int64_t left) {
        high = larger(keep(load(score + s), left, -INFINITY), high);
    });
    const Floats largest = all(most(high));
    sweep(count, [&](int64_t s, int64_t left) {
        const Floats p = exponential(load(score + s) - largest);
        total = total + keep(p, left, 0.0f);
        store(p, score + s);
    });
    const Floats by = all(count ? 1.0f / sum(total) : 0.0f);
    const auto mean = [&](auto vectors, int64_t i) {
        Floats total[vectors];
        for (int c = 0; c < vectors; c++) total[c] = all(0.0f);
        for (int64_t s = 0; s < count; s++) {
            const uint16_t* v = value + slot[s] * layout.slot + i;
            for (int c = 0; c < vectors; c++)
                total[c] = fma(all(score[s]), widen(v + 16 * c), total[c]);
        }
        for (int c = 0; c < vectors; c++)
            store(total[c] * by, out + i + 16 * c, a.value_width - i - 16 * c);
    };
    int64_t i = 0;
    for (; i + 64 <= layout.value; i += 64) mean(std::integral_constant<int, 4>(), i);
    for (; i < layout.value; i += 16) mean(std::integral_constant<int, 1>(), i);
}

// All heads of all tokens, joined and projected; queries are the first columns of work.wide.
void attend_all(Team& team, const Attention& a, const Tokens& at, const Cache& cache,
                int64_t block, bool causal, int64_t stride, Work& work) {
    const Layout layout(a);
    const int64_t H = a.heads, K = a.key_width, V = a.value_width;
    const uint16_t* data = cache.data + block * cache.slots * layout.slot;
    const auto keys = [&](int64_t t) {
        return causal ? at.position[t] + 1 : cache.count[at.sequence[t]];
    };
    int64_t longest = 0;
    for (int64_t t = 0; t < at.count; t++) longest = std::max(longest, keys(t));
    const auto head = [&](int64_t i) {
        const int64_t t = i / H, h = i % H;
        attend(a, layout, &work.wide[t * stride + h * K], data, h / (H / a.key_heads),
               cache.table + at.sequence[t] * cache.width, keys(t), &work.heads[i * V]);
    };
    if (at.count < 8) team.each(at.count * H, longest * (K + V) / 4, head);
    team.each(at.count, longest * H * (K + V) / 4, [&](int64_t t) {
        for (int64_t h = 0; at.count >= 8 && h < H; h++) head(t * H + h);
        work.quantize(&work.heads[t * H * V], H * V, t);
    });
    multiply(team, {&a.output}, at.count, work, work.out.data(), at.width);
}

void self_attention(Team& team, const Attention& a, const Tokens& at, int64_t block,
                    bool write_only, Work& work) {
    const Layout layout(a);
    const int64_t stride = a.query.out + a.key.out + a.value.out;
    uint16_t* data = at.self.data + block * at.self.slots * layout.slot;
    float* wide = work.wide.data();
    multiply(team, {&a.query, &a.key, &a.value}, at.count, work, wide, stride);
    team.each(at.count, stride, [&](int64_t t) {
        float* row = wide + t * stride;
        if (at.rotary.table)
            rotate(at.rotary, at.position[t], row, a.heads + a.key_heads, a.key_width);
        const int32_t slot = at.self.table[at.sequence[t] * at.self.width + at.position[t]];
        layout.store(a, row + a.query.out, data + slot * layout.slot);
    });
    if (!write_only) attend_all(team, a, at, at.self, block, at.causal, stride, work);
}

void feed_forward(Team& team, const Block& block, const Tokens& at, Work& work) {
    const int64_t hidden = block.expand.out, stride = block.gated ? 2 * hidden : hidden;
    float* wide = work.wide.data();
    if (block.gated)
        multiply(team, {&block.expand, &block.gate}, at.count, work, wide, stride);
    else
        multiply(team, {&block.expand}, at.count, work, wide, stride);
    team.each(at.count, hidden * 2, [&](int64_t t) {
        float *x = wide + t * stride, *gate = block.gated ? x + hidden : x;
        sweep(hidden, [&](int64_t i, int64_t left) {
            Floats y = activate(load(gate + i, left), block.activation);
            if (block.gated) y = y * load(x + i, left);
            store(y, x + i, left);
        });
        work.quantize(x, hidden, t);
    });
    multiply(team, {&block.reduce}, at.count, work, work.out.data(), at.width);
}

}  // namespace

extern "C" {

// y = x Wᵀ + b
void linear(const Linear* given, const float* x, int64_t rows, float* y, int threads) {
    Team team(threads);
    Work& work = Work::of(rows, given->in, 0);
    work.quantize_all(team, x, rows, given->in);
    multiply(team, {given}, rows, work, y, given->out);
}

// The keys and values that cross-attention reads of these rows, written into slots.
void project_memory(const Block* blocks, int64_t count, const float* x, int64_t rows,
                    uint16_t* data, int64_t slots, const int32_t* slot, int threads) {
    Team team(threads);
    const int64_t width = blocks[0].cross.key.in;
    const int64_t kv = blocks[0].cross.key.out + blocks[0].cross.value.out;
    Work& work = Work::of(rows, std::max(width, kv), 0);
    work.quantize_all(team, x, rows, width);
    float* wide = work.wide.data();
    for (int64_t n = 0; n < count; n++) {
        const Attention& a = blocks[n].cross;
        const Layout layout(a);
        multiply(team, {&a.key, &a.value}, rows, work, wide, kv);
        team.each(rows, kv / 4, [&](int64_t r) {
            layout.store(a, wide + r * kv, data + (n * slots + slot[r]) * layout.slot);
        });
    }
}

// How many halves a token takes in a block's cache.
int64_t slot_width(const Attention* a) { return Layout(*a).slot; }

// All blocks, and at their end a LayerNorm and the logits, where they are given. Without logits, a
// causal stack does no more than fill its cache.
void run(const Block* blocks, int64_t count, const Tokens* tokens, const Norm* norm,
         const Linear* output, float* logits, int threads) {
    Team team(threads);
    Tokens at = *tokens;
    int64_t widest = at.width, heads = 0;
    for (int64_t n = 0; n < count; n++) {
        const Block& b = blocks[n];
        widest = std::max({widest, b.self.query.out + b.self.key.out + b.self.value.out,
                           b.expand.out + b.gate.out, b.cross.query.out});
        heads = std::max({heads, b.self.output.in, b.cross.output.in});
    }
    Work& work = Work::of(at.count, widest, heads);
    const float* out = work.out.data();
    work.x.resize(at.x ? 0 : at.count * at.width);
    if (!at.x) at.x = work.x.data();
    if (at.embedding.table) embed(team, at);
    residual(team, at, nullptr, nullptr, blocks[0].pre_norm ? &blocks[0].self_norm : nullptr, work);
    for (int64_t n = 0; n < count; n++) {
        const Block& b = blocks[n];
        const bool pre = b.pre_norm, last = n + 1 == count;
        const auto add = [&](const Norm& own, const Norm* next) {
            residual(team, at, out, pre ? nullptr : &own, pre ? next : nullptr, work);
        };
        self_attention(team, b.self, at, n, last && at.causal && !output, work);
        if (last && at.causal && !output) return;
        add(b.self_norm, b.has_cross ? &b.cross_norm : &b.feed_forward_norm);
        if (b.has_cross) {
            multiply(team, {&b.cross.query}, at.count, work, work.wide.data(), b.cross.query.out);
            attend_all(team, b.cross, at, at.memory, n, false, b.cross.query.out, work);
            add(b.cross_norm, &b.feed_forward_norm);
        }
        feed_forward(team, b, at, work);
        add(b.feed_forward_norm, last ? nullptr : &blocks[n + 1].self_norm);
    }
    if (norm->gain) residual(team, at, nullptr, norm, nullptr, work);
    if (output) multiply(team, {output}, at.count, work, logits, output->out);
}

// log Σ_n e^x_rn of every row.
void log_sums(const float* x, int64_t rows, int64_t width, float* sums, int threads) {
    Team team(threads);
    team.each(rows, width * 2, [&](int64_t r) {
        const float* row = x + r * width;
        Floats high = all(-INFINITY), total = all(0.0f);
        sweep(width, [&](int64_t i, int64_t left) {
            high = larger(keep(load(row + i, left), left, -INFINITY), high);
        });
        const float largest = most(high);
        const Floats by = all(largest > -INFINITY ? largest : 0.0f);
        sweep(width, [&](int64_t i, int64_t left) {
            const Floats d = keep(load(row + i, left) - by, left, -INFINITY);
            total = total + where_less(d, all(-87.0f), all(0.0f), exponential(d));
        });
        sums[r] = largest + float(std::log(double(sum(total))));
    });
}

// The `count` largest of each row, largest first, and of equals the first.
void largest(const float* x, int64_t rows, int64_t width, int64_t count, float* values,
             int64_t* places, int threads) {
    Team team(threads);
    team.each(rows, width / 4, [&](int64_t r) {
        const float* row = x + r * width;
        float* value = values + r * count;
        int64_t *place = places + r * count, have = 0;
        for (int64_t i = 0; i < width; i += 16) {
            if (have == count && i + 16 <= width &&
                !any_larger(load(row + i), value[count - 1]))
                continue;
            for (int64_t n = i; n < std::min(i + 16, width); n++) {
                if (have == count && !(row[n] > value[count - 1])) continue;
                int64_t at = have < count ? have++ : count - 1;
                for (; at > 0 && row[n] > value[at - 1]; at--) {
                    value[at] = value[at - 1];
                    place[at] = place[at - 1];
                }
                value[at] = row[n];
                place[at] = n;
            }
        }
    });
}
}
