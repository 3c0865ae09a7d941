// Transformer stacks with 8-bit weights, and what a search asks of logits.
//
//     y_rn = s_r t_n Σ_k q_rk w_nk + b_n        q, w integers from -127 to 127
//
// s_r = max |x_r| / 127 is row r's own scale, and t_n that of row n of the weights: a row does not
// depend on what else is in its batch. The integers' sums are exact: they may wrap around on the
// way, and end within 32 bits (linear.py sees to it). All else is float32, but for the KV cache,
// which holds IEEE halves. NaNs propagate.
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
#include "search.h"
#include "simd.h"

constexpr int64_t COLUMNS = 16 * GROUPS;

extern "C" {

// How linear.py packs weights: outputs and inputs of a block, and what activations have added.
int64_t packing[] = {COLUMNS, DEPTH, OFFSET};

struct Linear {
    int64_t in, out;
    const int8_t* weight;       // (out / COLUMNS, in / DEPTH, COLUMNS, DEPTH), padded with zeros
    const int32_t* start;       // -OFFSET Σ_k w_nk, which the offset would add; padded
    const float *scale, *bias;  // padded
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

// Without cross-attention, or without a gate, these have no outputs.
struct Block {
    Attention self, cross;
    Linear expand, gate, reduce;
    Norm self_norm, cross_norm, feed_forward_norm;
    int64_t pre_norm, activation;
};

// x_t = scale table[id_t] + place[position_t]
struct Embedding {
    const int64_t* id;
    const float *table, *place;  // no table where vectors are given, and perhaps no places
    double scale;
};

struct RotaryEmbedding {
    const float* table;  // cos and sin, (positions, 2, pairs), or null
    int64_t pairs, halves;
};

// Keys and values of every block, and for each sequence the slots that hold its own.
struct Cache {
    uint16_t* data;  // (blocks, slots, slot_width)
    int64_t slots;
    int32_t* table;  // (sequences, width)
    int64_t width;
    int64_t* length;
};

struct Tokens {
    int64_t count, width, causal;
    int64_t window;  // positions to either side that self-attention reads; 0: no limit
    float* x;  // (count, width), becomes the result; null where nobody wants it
    const int64_t *sequence, *position;
    Embedding embedding;
    RotaryEmbedding rotary;
    Cache cache, memory;
};
}

namespace {

enum { RELU, GELU, SILU };

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// x Φ(x) to 3e-7, from erfc(t) = e^(-t p(t)) with t = |x| / √2 and a polynomial p.
INLINE Floats gelu(Floats x) {
    const Floats size = larger(x, all(0.0f) - x), t = smaller(all(5.0f), size * all(0.70710678f));
    const Floats p = polynomial(
        t, 2.62370577e-07f, -6.59261104e-06f, 6.96470524e-05f, -0.000388756511f, 0.00105406437f,
        0.000689729815f, -0.0198103599f, 0.103046201f, 0.636568964f, 1.12838221f);
    const Floats tail = all(0.5f) * exponential((all(0.0f) - t) * p);
    return x * where_less(x, all(0.0f), tail, all(1.0f) - tail);
}

INLINE Floats activate(Floats x, int64_t kind) {
    if (kind == RELU) return larger(all(0.0f), x);
    return kind == GELU ? gelu(x) : x / (exponential(all(0.0f) - x) + all(1.0f));
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

void rotate(const RotaryEmbedding& rotary, int64_t position, float* x, int64_t heads, int64_t width) {
    const int64_t pairs = rotary.pairs, step = rotary.halves ? 1 : 2;
    const int64_t other = rotary.halves ? pairs : 1;
    const float *cos = rotary.table + position * 2 * pairs, *sin = cos + pairs;
    for (int64_t h = 0; h < heads; h++, x += width)
        for (int64_t i = 0; i < pairs; i++) {
            float &a = x[i * step], &b = x[i * step + other];
            const float rotated = a * cos[i] - b * sin[i];
            b = a * sin[i] + b * cos[i];
            a = rotated;
        }
}

// A slot: the keys of all heads and then their values, each padded to a multiple of 16.
struct Slot {
    int64_t key, value, width;

    explicit Slot(const Attention& a)
        : key(up(a.key_width, 16)),
          value(up(a.value_width, 16)),
          width(a.key_heads * (key + value)) {}

    void store(const Attention& a, const float* x, uint16_t* y) const {
        for (int64_t h = 0; h < 2 * a.key_heads; h++) {
            const bool keys = h < a.key_heads;
            const int64_t size = keys ? a.key_width : a.value_width;
            // What is too large for 16 bits stays finite.
            sweep(size, [&](int64_t i, int64_t left) {
                const Floats v = smaller(all(65504.0f), load(x + i, left));
                narrow(larger(all(-65504.0f), v), y + i);
            });
            x += size, y += keys ? key : value;
        }
    }
};

// softmax(beta q·k) v of one query over the keys and values of one head.
void attend(const Attention& a, const Slot& slot, const float* query, const uint16_t* key,
            const uint16_t* value, const int32_t* slots, int64_t count, float* out) {
    static thread_local std::vector<float> room;
    if (int64_t(room.size()) < slot.key + count + 16) room.resize(slot.key + 2 * count + 16);
    float *q = room.data(), *score = q + slot.key;
    sweep(a.key_width, [&](int64_t i, int64_t left) {
        store(load(query + i, left) * all(float(a.beta)), q + i);
    });
    for (int64_t s = 0; s < count; s += 4) {
        Floats products[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
        const uint16_t* k[4];
        for (int c = 0; c < 4; c++) k[c] = key + slots[std::min(s + c, count - 1)] * slot.width;
        for (int64_t i = 0; i < slot.key; i += 16) {
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
    high = all(most(high));
    sweep(count, [&](int64_t s, int64_t left) {
        const Floats p = exponential(load(score + s) - high);
        total = total + keep(p, left, 0.0f);
        store(p, score + s);
    });
    const Floats by = all(count ? 1.0f / sum(total) : 0.0f);
    const auto mean = [&](auto vectors, int64_t i) {
        Floats sum[vectors];
        for (int c = 0; c < vectors; c++) sum[c] = all(0.0f);
        for (int64_t s = 0; s < count; s++) {
            const uint16_t* v = value + slots[s] * slot.width + i;
            for (int c = 0; c < vectors; c++)
                sum[c] = fma(all(score[s]), widen(v + 16 * c), sum[c]);
        }
        for (int c = 0; c < vectors; c++)
            store(sum[c] * by, out + i + 16 * c, a.value_width - i - 16 * c);
    };
    int64_t i = 0;
    for (; i + 64 <= slot.value; i += 64) mean(std::integral_constant<int, 4>(), i);
    for (; i + 32 <= slot.value; i += 32) mean(std::integral_constant<int, 2>(), i);
    for (; i < slot.value; i += 16) mean(std::integral_constant<int, 1>(), i);
}

// M rows times a block of columns, from column n on.
template <int M>
void tile(const Linear& linear, int64_t n, const Activation* q, const float* scale, float* y,
          int64_t stride) {
    constexpr int N = GROUPS * PARTS;
    const int64_t inputs = up(linear.in, DEPTH), row = up(linear.in, 16);
    const int8_t* w = linear.weight + n * inputs;
    W sum[M][N], column[N];
    for (int m = 0; m < M; m++)
        for (int i = 0; i < N; i++) sum[m][i] = load<W>(linear.start + n + i * LANES);
    for (int64_t k = 0; k < inputs; k += DEPTH, w += COLUMNS * DEPTH) {
        for (int i = 0; i < N; i++) column[i] = weights(w + i * LANES * DEPTH);
        for (int m = 0; m < M; m++) {
            const W x = load<int32_t>(q + m * row + k) - W{};
            for (int i = 0; i < N; i++) sum[m][i] = dot(sum[m][i], x, column[i]);
        }
    }
    // Compilers keep sums in registers where all indices are constants.
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++) {
            const int64_t at = n + 16 * g;
            Ints whole;
            for (int p = 0; p < PARTS; p++) whole.part[p] = sum[m][g * PARTS + p];
            const Floats t = load(linear.scale + at) * all(scale[m]);
            const Floats z = fma(floats(whole), t, load(linear.bias + at));
            store(z, y + m * stride + at, linear.out - at);
        }
}

template <int M>
void tiles(const Linear& linear, int64_t n, int64_t rows, const Activation* q, const float* scale,
           float* y, int64_t stride) {
    for (; rows >= M; rows -= M, q += M * up(linear.in, 16), scale += M, y += M * stride)
        tile<M>(linear, n, q, scale, y, stride);
    if constexpr (M > 1)
        if (rows) tiles<M - 1>(linear, n, rows, q, scale, y, stride);
}

constexpr int64_t NEAR = 1 << 17;  // floats that a core has at hand

// Tokens on their way through a stack.
class Pass {
    // What threads hand each other; kept from call to call.
    struct Room {
        std::vector<Activation> q;
        std::vector<float> scale, wide, out, heads, x, logits;
    };
    Team team;
    Room& room;
    Tokens at;

    static Room& own() {
        static thread_local Room room;
        return room;
    }

  public:
    // `widest` is the most that a matrix gives for a token, and `heads` the most that joined heads do.
    Pass(const Tokens& tokens, int64_t widest, int64_t heads, int threads)
        : team(threads), room(own()), at(tokens) {
        const auto reserve = [&](auto& some, int64_t each) {
            if (int64_t(some.size()) < at.count * each) some.resize(at.count * each);
        };
        reserve(room.q, up(std::max(widest, heads), 16));
        reserve(room.scale, 1);
        reserve(room.wide, widest);
        reserve(room.out, widest);
        reserve(room.heads, heads);
        if (at.x) return;
        reserve(room.x, at.width);
        at.x = room.x.data();
    }

    // q = round(127 x / max |x|)
    void quantize(const float* x, int64_t width, int64_t token) {
        // Without signs, the bits of floats are ordered as floats are, and NaNs are the largest.
        Ints high = all(0);
        sweep(width, [&](int64_t i, int64_t left) {
            high = larger(high, bits(load(x + i, left)) & all(0x7FFFFFFF));
        });
        float lane[16];
        store(from_bits(high), lane);
        int32_t last = 0;
        for (const float& one : lane) last = std::max(last, load<int32_t>(&one));
        const float largest = load<float>(&last);
        room.scale[token] = largest <= FLT_MAX ? largest / 127.0f : NAN;
        const Floats by = all(largest > 0 ? std::min(127.0f / largest, FLT_MAX) : 0.0f);
        Activation* q = room.q.data() + token * up(width, 16);
        sweep(width, [&](int64_t i, int64_t left) {
            narrow(integers(load(x + i, left) * by) + all(OFFSET), q + i);
        });
    }
    void quantize() {
        team.each(at.count, at.width / 4,
                  [&](int64_t t) { quantize(at.x + t * at.width, at.width, t); });
    }

    // Products of what is quantized with several matrices, side by side.
    void multiply(std::initializer_list<const Linear*> matrices, float* y, int64_t stride) {
        constexpr int64_t SHARE = 16 * ROWS;  // of the tokens, for threads to have equal shares
        const int64_t in = (*matrices.begin())->in, shares = up(at.count, SHARE) / SHARE;
        int64_t blocks = 0;
        for (const Linear* one : matrices) blocks += up(one->out, COLUMNS) / COLUMNS;
        const int64_t work = std::min(at.count, SHARE) * in / DEPTH * PARTS * GROUPS;
        team.each(blocks * shares, work, [&](int64_t i) {
            const int64_t first = i % shares * SHARE, count = std::min(at.count - first, SHARE);
            const Activation* q = room.q.data() + first * up(in, 16);
            float* to = y + first * stride;
            int64_t n = i / shares * COLUMNS;
            for (const Linear* one : matrices) {
                if (n < one->out)
                    return tiles<ROWS>(*one, n, count, q, &room.scale[first], to, stride);
                n -= up(one->out, COLUMNS);
                to += one->out;
            }
        });
    }

    void embed() {
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
    void residual(const float* y, const Norm& post, const Norm& pre) {
        team.each(at.count, at.width, [&](int64_t t) {
            float *x = at.x + t * at.width, *z = x;
            for (int64_t i = 0; y && i < at.width; i++) x[i] += y[t * at.width + i];
            if (post.gain) normalize(post, x, at.width, x);
            if (pre.gain) z = room.out.data() + t * at.width;  // y's own place, which was read
            if (pre.gain) normalize(pre, x, at.width, z);
            quantize(z, at.width, t);
        });
    }

    // Keys and values of a block, which follow the queries in the rows of room.wide.
    void cache_keys(const Attention& a, const Cache& cache, int64_t block, int64_t queries) {
        const Slot slot(a);
        uint16_t* data = cache.data + block * cache.slots * slot.width;
        const int64_t stride = queries + a.key.out + a.value.out;
        team.each(at.count, stride, [&](int64_t t) {
            float* row = room.wide.data() + t * stride;
            if (at.rotary.table)
                rotate(at.rotary, at.position[t], row, a.heads + a.key_heads, a.key_width);
            const int32_t to = cache.table[at.sequence[t] * cache.width + at.position[t]];
            slot.store(a, row + queries, data + to * slot.width);
        });
    }

    // Of all heads, joined and projected: queries are in the rows of room.wide.
    void attend_all(const Attention& a, const Cache& cache, int64_t block, bool causal,
                    int64_t window, int64_t stride) {
        const Slot slot(a);
        const int64_t H = a.heads, K = a.key_width, V = a.value_width;
        const uint16_t* keys = cache.data + block * cache.slots * slot.width;
        const uint16_t* values = keys + a.key_heads * slot.key;
        const auto first = [&](int64_t t) {
            return window ? std::max(int64_t(0), at.position[t] - window) : 0;
        };
        const auto count = [&](int64_t t) {
            const int64_t length = cache.length[at.sequence[t]], here = at.position[t];
            const int64_t end = causal   ? here + 1
                                : window ? std::min(length, here + window + 1)
                                         : length;
            return end - first(t);
        };
        int64_t longest = 0;
        for (int64_t t = 0; t < at.count; t++) longest = std::max(longest, count(t));
        const auto head = [&](int64_t i) {
            const int64_t t = i / H, h = i % H, group = h / (H / a.key_heads);
            attend(a, slot, &room.wide[t * stride + h * K], keys + group * slot.key,
                   values + group * slot.value,
                   cache.table + at.sequence[t] * cache.width + first(t), count(t),
                   &room.heads[i * V]);
        };
        const bool few = at.count < 8;  // too few for threads to share, unless head by head
        const int64_t work = longest * (K + V) / 4;
        if (few) team.each(at.count * H, work, head);
        team.each(at.count, few ? H * V / 4 : H * work, [&](int64_t t) {
            for (int64_t h = 0; !few && h < H; h++) head(t * H + h);
            quantize(&room.heads[t * H * V], H * V, t);
        });
        multiply({&a.output}, room.out.data(), at.width);
    }

    void feed_forward(const Block& b) {
        const int64_t hidden = b.expand.out, stride = hidden + b.gate.out;
        if (b.gate.out)
            multiply({&b.expand, &b.gate}, room.wide.data(), stride);
        else
            multiply({&b.expand}, room.wide.data(), stride);
        team.each(at.count, hidden * 2, [&](int64_t t) {
            float *x = room.wide.data() + t * stride, *gate = b.gate.out ? x + hidden : x;
            sweep(hidden, [&](int64_t i, int64_t left) {
                Floats y = activate(load(gate + i, left), b.activation);
                if (b.gate.out) y = y * load(x + i, left);
                store(y, x + i, left);
            });
            quantize(x, hidden, t);
        });
        multiply({&b.reduce}, room.out.data(), at.width);
    }

    // All blocks, and what an output layer would read; without one, no more than the cache's part.
    void run(const Block* blocks, int64_t count, const Norm& norm, bool output) {
        const Norm none = {};
        if (at.embedding.table) embed();
        residual(nullptr, none, blocks[0].pre_norm ? blocks[0].self_norm : none);
        for (int64_t n = 0; n < count; n++) {
            const Block& b = blocks[n];
            const bool pre = b.pre_norm, last = n + 1 == count;
            const auto add = [&](const Norm& own, const Norm& next) {
                residual(room.out.data(), pre ? none : own, pre ? next : none);
            };
            const int64_t stride = b.self.query.out + b.self.key.out + b.self.value.out;
            multiply({&b.self.query, &b.self.key, &b.self.value}, room.wide.data(), stride);
            cache_keys(b.self, at.cache, n, b.self.query.out);
            if (last && at.causal && !output) return;
            attend_all(b.self, at.cache, n, at.causal, at.window, stride);
            add(b.self_norm, b.cross.heads ? b.cross_norm : b.feed_forward_norm);
            if (b.cross.heads) {
                multiply({&b.cross.query}, room.wide.data(), b.cross.query.out);
                attend_all(b.cross, at.memory, n, false, 0, b.cross.query.out);
                add(b.cross_norm, b.feed_forward_norm);
            }
            feed_forward(b);
            add(b.feed_forward_norm, last ? none : blocks[n + 1].self_norm);
        }
        if (norm.gain) residual(nullptr, norm, none);
    }

    // body(t, logits) for all tokens, of which nobody else wants the logits: where they are many,
    // they are computed for as few at a time as stay in a core's cache until they are read, unless
    // to read all weights again for so few would cost more.
    template <class Body>
    void choose(const Linear& output, const Body& body) {
        const int64_t N = output.out, some = std::max(NEAR / N, output.in / 8);
        const int64_t fit = std::max<int64_t>(some / ROWS, 1) * ROWS;
        if (at.count <= 2 * fit) {
            if (int64_t(room.logits.size()) < at.count * N) room.logits.resize(at.count * N);
            multiply({&output}, room.logits.data(), N);
            return team.each(at.count, N, [&](int64_t t) { body(t, &room.logits[t * N]); });
        }
        const int64_t groups = up(at.count, fit) / fit, work = fit * N * up(output.in, DEPTH) / 64;
        team.each(groups, work, [&](int64_t g) {
            static thread_local std::vector<float> logits;
            if (int64_t(logits.size()) < fit * N) logits.resize(fit * N);
            const int64_t first = g * fit, count = std::min(at.count - first, fit);
            const Activation* q = room.q.data() + first * up(output.in, 16);
            for (int64_t n = 0; n < N; n += COLUMNS)
                tiles<ROWS>(output, n, count, q, &room.scale[first], logits.data(), N);
            for (int64_t t = 0; t < count; t++) body(first + t, &logits[t * N]);
        });
    }

    void project_memory(const Block* blocks, int64_t count) {
        quantize();
        for (int64_t n = 0; n < count; n++) {
            const Attention& a = blocks[n].cross;
            multiply({&a.key, &a.value}, room.wide.data(), a.key.out + a.value.out);
            cache_keys(a, at.cache, n, 0);
        }
    }
};

// Room for these tokens on their way through these blocks.
Pass through(const Block* blocks, int64_t count, const Tokens& tokens, int threads) {
    int64_t widest = tokens.width, heads = 0;
    for (const Block* b = blocks; b < blocks + count; b++) {
        widest = std::max({widest, b->self.query.out + b->self.key.out + b->self.value.out,
                           b->expand.out + b->gate.out, b->cross.query.out});
        heads = std::max({heads, b->self.output.in, b->cross.output.in});
    }
    return Pass(tokens, widest, heads, threads);
}

// Beams of a sentence, from `first` on, continue each other: what they list changes, and no slot.
void reorder(const Cache& cache, const int64_t* rows, int64_t first, int64_t count,
             std::vector<int32_t>& before) {
    const int64_t length = cache.length[first];
    int32_t* table = cache.table + first * cache.width;
    before.resize(count * length);
    for (int64_t n = 0; n < count; n++)
        std::copy_n(table + n * cache.width, length, &before[n * length]);
    for (int64_t n = 0; n < count; n++)
        if (rows[n] != first + n)
            std::copy_n(&before[(rows[n] - first) * length], length, table + n * cache.width);
}

}  // namespace

extern "C" {

// How many halves keys and values of a token take.
int64_t slot_width(const Attention* a) { return Slot(*a).width; }

// y = x Wᵀ + b
void linear(const Linear* given, float* x, int64_t rows, float* y, int threads) {
    Tokens tokens = {};
    tokens.count = rows, tokens.width = given->in, tokens.x = x;
    Pass pass(tokens, given->in, 0, threads);
    pass.quantize();
    pass.multiply({given}, y, given->out);
}

// All blocks, and at their end a LayerNorm and the logits, where they are given. Without logits, a
// causal stack does no more than fill its cache.
void run(const Block* blocks, int64_t count, const Tokens* tokens, const Norm* norm,
         const Linear* output, float* logits, int threads) {
    Pass pass = through(blocks, count, *tokens, threads);
    pass.run(blocks, count, *norm, output);
    if (output) pass.multiply({output}, logits, output->out);
}

// Fills a cache with the keys and values that cross-attention reads of these vectors.
void project_memory(const Block* blocks, int64_t count, const Tokens* tokens, int threads) {
    const int64_t kv = blocks[0].cross.key.out + blocks[0].cross.value.out;
    Pass(*tokens, std::max(tokens->width, kv), 0, threads).project_memory(blocks, count);
}

// log p of the best tokens of every row at step t; logits of banned ones may be overwritten.
void best_tokens(float* logits, int64_t rows, int64_t width, const Rule* rule, int64_t each, int64_t t,
                 int64_t count, float* values, int64_t* tokens, int threads) {
    Team(threads).each(rows, width, [&](int64_t r) {
        const bool early = rule->least && t < rule->least[r / each];
        best(logits + r * width, width, *rule, early, count, values + r * count, tokens + r * count);
    });
}

// Steps of model and search, until all sentences are over; gives how many were taken. `slots` are
// free ones of the cache, whose table has room for all that is read.
int64_t advance(const Block* blocks, int64_t count, const Tokens* given, const Norm* norm,
                const Linear* output, const Search* search, int64_t steps, const int32_t* slots,
                int64_t* used, int threads) {
    const Search& s = *search;
    Tokens tokens = *given;
    Cache& cache = tokens.cache;
    const int64_t w = s.each, k = s.beams ? std::min(2 * s.beams->W, output->out) : 1;
    std::vector<int64_t> sentence, row, position, id, token;
    std::vector<int32_t> table;
    std::vector<float> value;
    for (int64_t step = 0; step < steps; step++) {
        sentence.clear(), row.clear(), position.clear(), id.clear();
        for (int64_t n = 0; n < s.sentences; n++) {
            if (s.over[s.place ? s.place[n] : n]) continue;
            sentence.push_back(n);
            if (step && s.beams) reorder(cache, s.rows + n * w, n * w, w, table);
            for (int64_t r = n * w; r < (n + 1) * w; r++) {
                const int64_t place = cache.length[r]++;
                cache.table[r * cache.width + place] = slots[(*used)++];
                row.push_back(r), position.push_back(place), id.push_back(s.last[r]);
            }
        }
        if (sentence.empty()) return step;
        tokens.count = int64_t(row.size());
        tokens.sequence = row.data(), tokens.position = position.data();
        tokens.embedding.id = id.data();
        value.resize(row.size() * k), token.resize(row.size() * k);
        Pass pass = through(blocks, count, tokens, threads);
        pass.run(blocks, count, *norm, true);
        pass.choose(*output, [&](int64_t n, float* logits) {
            const int64_t of = row[n] / w, b = s.place ? s.place[of] : of;
            const bool early = s.rule.least && s.t[b] < s.rule.least[b];
            best(logits, output->out, s.rule, early, k, &value[n * k], &token[n * k]);
        });
        for (int64_t n = 0; n < int64_t(sentence.size()); n++) {
            const int64_t of = sentence[n], at = n * w * k;
            if (s.beams)
                extend(s, of, k, &value[at], &token[at]);
            else
                follow(s, of, value[at], token[at]);
            s.t[s.place ? s.place[of] : of]++;
        }
    }
    return steps;
}
}
