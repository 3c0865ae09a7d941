// Stacks of Transformer blocks with 8-bit weights, and what a search asks of logits, for CPUs with
// AVX-512 VNNI.
//
//     y_rn = s_r t_n Σ_k q_rk w_nk + b_n        q, w whole numbers from -127 to 127
//
// s_r is row r's own scale, max |x_r| / 127, and t_n that of row n of the weights: what else is in a
// batch changes nothing in a row. The sums are exact: they wrap around where they pass 32 bits on
// the way, and end within them (quantized.py sees to it). All else is float32, but keys and values
// are kept as IEEE halves, to one part in 2048. What is not a number makes its row not a number.
//
// Rows are tokens. Which keys and values a row reads is said by numbers of rows in one buffer, so
// that beams are reordered, and sentences are of any length, without copying or filling.
//
// Functions with `omp for` or `omp barrier` in them are called by all threads of run(), remember()
// or linear() at once, which share their loops.

// GCC 12 takes its own "undefined" vectors for mistakes.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" {

struct Linear {
    int64_t in, out;
    const int8_t* weight;  // (out / 64, in / 4, 64, 4), filled up with zeros
    const int32_t* start;  // -128 Σ_k w_nk: activations are stored with 128 added
    const float* scale;    // t_n
    const float* bias;     // or null
};

struct Norm {
    const float *gain, *shift;  // gain is null where there is no norm
    double epsilon;
};

struct Attention {
    int64_t heads, key_heads, key_width, value_width;
    double beta;
    Linear query, key, value, output;
    const float* turn;  // rotary positions: cos and sin, (positions, 2, pairs), or null
    int64_t turned, halves;
};

struct Block {
    Attention own, cross;
    Linear expand, gate, reduce;
    Norm own_norm, cross_norm, last_norm;
    int64_t has_cross, pre, activation, gated;
};

// What the rows of a step read and where they write.
struct Rows {
    int64_t rows, width;
    float* x;                         // (rows, width), becomes the result
    uint16_t* kept;                   // (blocks, room, keys and values): what self-attention reads
    int64_t room, base;               // new rows are written from `base` on
    int32_t* table;                   // (rows, columns): numbers of kept rows, or null
    int64_t columns, filled;          // the first columns are read, and the new rows' is written
    const int64_t *start, *count;     // without a table: from where on a row reads, and how many
    const int64_t* place;             // and its own position
    const uint16_t* memory;           // (blocks, places, keys and values) of the sources
    int64_t places;
    const int64_t *memory_start, *memory_count;
};
}

namespace {

enum { NONE, RELU, GELU, SILU };

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

__mmask16 first(int64_t n) { return n >= 16 ? 0xFFFF : (__mmask16)((1u << n) - 1); }

// e^x by 2^n e^r with |r| <= ln 2 / 2, and a polynomial for e^r (as in Cephes).
__m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                    5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

__m512 activated(__m512 x, int64_t kind) {
    switch (kind) {
        case RELU:
            return _mm512_max_ps(x, _mm512_setzero_ps());
        case SILU: {
            __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
            return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
        }
        case GELU: {
            alignas(64) float lane[16];
            _mm512_store_ps(lane, x);
            for (float& v : lane) v = 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
            return _mm512_load_ps(lane);
        }
        default:
            return x;
    }
}

// Room that a thread keeps from call to call.
struct Work {
    std::vector<uint8_t> bytes;
    std::vector<float> scale, wide, out, joined;
};

// Activations as whole numbers, a row at a time: q = round(127 x / max |x|) + 128.
void whole_row(const float* x, int64_t n, uint8_t* q, float* scale) {
    // Without their signs, bits of floats are ordered as the floats are, and those of what is not
    // a number come last: it becomes the scale, and so does not vanish.
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 v = _mm512_maskz_loadu_ps(first(n - i), x + i);
        most = _mm512_max_epi32(most, _mm512_castps_si512(_mm512_abs_ps(v)));
    }
    const int32_t bits = _mm512_reduce_max_epi32(most);
    float largest;
    std::memcpy(&largest, &bits, 4);
    *scale = largest / 127.0f;
    __m512 by = _mm512_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(first(n - i), x + i), by);
        __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(128));
        _mm_mask_storeu_epi8(q + i, first(up(n, 4) - i), _mm512_cvtepi32_epi8(whole));
    }
}

void whole(const float* x, int64_t rows, int64_t width, Work& work) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        whole_row(x + r * width, width, &work.bytes[r * up(width, 4)], &work.scale[r]);
}

void store(const Linear& linear, int64_t n, float scale, __m512i a, __m512i b, __m512i c,
           __m512i d, float* y) {
    for (__m512i sum : {a, b, c, d}) {
        if (n >= linear.out) return;
        const __mmask16 in = first(linear.out - n);
        const __m512 s = _mm512_mul_ps(_mm512_maskz_loadu_ps(in, linear.scale + n),
                                       _mm512_set1_ps(scale));
        const __m512 bias = linear.bias ? _mm512_maskz_loadu_ps(in, linear.bias + n)
                                        : _mm512_setzero_ps();
        _mm512_mask_storeu_ps(y + n, in, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), s, bias));
        n += 16;
    }
}

template <int M>
void tile(const Linear& linear, int64_t block, const uint8_t* q, const float* scale, float* y,
          int64_t stride) {
    const int64_t depth = up(linear.in, 4), steps = depth / 4, n = block * 64;
    const int8_t* w = linear.weight + block * 64 * depth;
    const __m512i start0 = _mm512_loadu_si512(linear.start + n),
                  start1 = _mm512_loadu_si512(linear.start + n + 16),
                  start2 = _mm512_loadu_si512(linear.start + n + 32),
                  start3 = _mm512_loadu_si512(linear.start + n + 48);
    // Each sum has a name of its own: compilers put arrays of them into memory.
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define BEGIN(m) __m512i m##0 = start0, m##1 = start1, m##2 = start2, m##3 = start3;
#define BEGIN_ROW(m) BEGIN(sum##m)
#define ADD_ROW(m)                                                  \
    if (M > m) {                                                    \
        int32_t four;                                               \
        std::memcpy(&four, q + m * depth + 4 * k, 4);               \
        const __m512i row = _mm512_set1_epi32(four);                \
        sum##m##0 = _mm512_dpbusd_epi32(sum##m##0, row, column0);   \
        sum##m##1 = _mm512_dpbusd_epi32(sum##m##1, row, column1);   \
        sum##m##2 = _mm512_dpbusd_epi32(sum##m##2, row, column2);   \
        sum##m##3 = _mm512_dpbusd_epi32(sum##m##3, row, column3);   \
    }
#define STORE_ROW(m)                                                                   \
    if (M > m)                                                                         \
        store(linear, n, scale[m], sum##m##0, sum##m##1, sum##m##2, sum##m##3, y + m * stride);
    EACH_ROW(BEGIN_ROW)
    for (int64_t k = 0; k < steps; k++, w += 256) {
        const __m512i column0 = _mm512_loadu_si512(w), column1 = _mm512_loadu_si512(w + 64),
                      column2 = _mm512_loadu_si512(w + 128), column3 = _mm512_loadu_si512(w + 192);
        EACH_ROW(ADD_ROW)
    }
    EACH_ROW(STORE_ROW)
}

// A block of columns stays in the cache while all rows pass by. Threads do not wait at the end.
void multiply(const Linear& linear, int64_t rows, const uint8_t* q, const float* scale, float* y,
              int64_t stride) {
    const int64_t depth = up(linear.in, 4), blocks = up(linear.out, 64) / 64;
#pragma omp for schedule(static) nowait
    for (int64_t block = 0; block < blocks; block++) {
        for (int64_t r = 0; r < rows; r += 6) {
            const uint8_t* from = q + r * depth;
            float* to = y + r * stride;
            switch (std::min<int64_t>(rows - r, 6)) {
                case 1: tile<1>(linear, block, from, scale + r, to, stride); break;
                case 2: tile<2>(linear, block, from, scale + r, to, stride); break;
                case 3: tile<3>(linear, block, from, scale + r, to, stride); break;
                case 4: tile<4>(linear, block, from, scale + r, to, stride); break;
                case 5: tile<5>(linear, block, from, scale + r, to, stride); break;
                default: tile<6>(linear, block, from, scale + r, to, stride);
            }
        }
    }
}

void normalize(const Norm& norm, const float* x, int64_t n, float* y) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16)
        sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(first(n - i), x + i));
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / n);
    __m512 square = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 in = first(n - i);
        __m512 d = _mm512_maskz_sub_ps(in, _mm512_maskz_loadu_ps(in, x + i), mean);
        square = _mm512_fmadd_ps(d, d, square);
    }
    const float variance = _mm512_reduce_add_ps(square) / n;
    const __m512 by = _mm512_set1_ps(1.0f / std::sqrt(variance + (float)norm.epsilon));
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 in = first(n - i);
        __m512 d = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(in, x + i), mean), by);
        __m512 v = _mm512_fmadd_ps(d, _mm512_maskz_loadu_ps(in, norm.gain + i),
                                   _mm512_maskz_loadu_ps(in, norm.shift + i));
        _mm512_mask_storeu_ps(y + i, in, v);
    }
}

// x += y, the norm where it belongs, and the result as whole numbers for the next product.
// `after` is this sublayer's own norm (post), `before` the next one's (pre).
void settle(const Rows& at, const float* y, const Norm& after, const Norm& before, Work& work) {
    const int64_t width = at.width;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < at.rows; r++) {
        float* x = at.x + r * width;
        if (y)
            for (int64_t i = 0; i < width; i++) x[i] += y[r * width + i];
        if (after.gain) normalize(after, x, width, x);
        const float* z = x;
        if (before.gain) {
            float* room = work.out.data() + r * width;  // y's own place, which has been read
            normalize(before, x, width, room);
            z = room;
        }
        whole_row(z, width, work.bytes.data() + r * up(width, 4), &work.scale[r]);
    }
}

void turn(const Attention& a, float* x, int64_t heads, int64_t place) {
    const int64_t pairs = a.turned / 2;
    const float *cos = a.turn + place * 2 * pairs, *sin = cos + pairs;
    const int64_t step = a.halves ? 1 : 2, other = a.halves ? pairs : 1;
    for (int64_t h = 0; h < heads; h++, x += a.key_width)
        for (int64_t i = 0; i < pairs; i++) {
            const float p = x[i * step], q = x[i * step + other];
            x[i * step] = p * cos[i] - q * sin[i];
            x[i * step + other] = p * sin[i] + q * cos[i];
        }
}

// Keys and values are IEEE halves where they lie, since reading them is what attention costs.
__m512 half(const uint16_t* x, __mmask16 in) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(in, x));
}

void halve(const float* x, int64_t n, uint16_t* y) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 in = first(n - i);
        // What is too large for 16 bits stays finite.
        const __m512 most = _mm512_set1_ps(65504.0f), v = _mm512_maskz_loadu_ps(in, x + i);
        const __m512 cut = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), most),
                                         _mm512_min_ps(most, v));
        _mm256_mask_storeu_epi16(y + i, in, _mm512_cvtps_ph(cut, 0));
    }
}

// One query of one head over `count` keys; `row(s)` is the number of the row that holds key s.
template <class Row>
void attend(const Attention& a, const float* query, const uint16_t* kept, int64_t stride,
            int64_t group, int64_t count, Row row, float* score, float* out) {
    const int64_t K = a.key_width, V = a.value_width;
    const uint16_t* key = kept + group * K;
    const uint16_t* value = kept + a.key_heads * K + group * V;
    float most = -INFINITY;
    for (int64_t s = 0; s < count; s++) {
        const uint16_t* k = key + row(s) * stride;
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < K; i += 16) {
            const __mmask16 in = first(K - i);
            sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(in, query + i), half(k + i, in), sum);
        }
        score[s] = _mm512_reduce_add_ps(sum) * (float)a.beta;
        most = std::max(most, score[s]);
    }
    __m512 total = _mm512_setzero_ps();
    for (int64_t s = 0; s < count; s += 16) {
        const __mmask16 in = first(count - s);
        __m512 d = _mm512_sub_ps(_mm512_maskz_loadu_ps(in, score + s), _mm512_set1_ps(most));
        __m512 p = _mm512_maskz_mov_ps(in, exponential(d));
        total = _mm512_add_ps(total, p);
        _mm512_mask_storeu_ps(score + s, in, p);
    }
    const float by = count ? 1.0f / _mm512_reduce_add_ps(total) : 0.0f;
    for (int64_t i = 0; i < V; i += 64) {
        __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                         _mm512_setzero_ps()};
        for (int64_t s = 0; s < count; s++) {
            const uint16_t* v = value + row(s) * stride + i;
            const __m512 p = _mm512_set1_ps(score[s]);
            for (int c = 0; c < 4; c++)
                if (i + 16 * c < V)
                    sum[c] =
                        _mm512_fmadd_ps(p, half(v + 16 * c, first(V - i - 16 * c)), sum[c]);
        }
        for (int c = 0; c < 4; c++)
            if (i + 16 * c < V)
                _mm512_mask_storeu_ps(out + i + 16 * c, first(V - i - 16 * c),
                                      _mm512_mul_ps(sum[c], _mm512_set1_ps(by)));
    }
}

// All heads of all rows, and the output's product. `read` is told row and head.
template <class Read>
void attend_all(const Attention& a, const Rows& at, Read read, Work& work) {
    const int64_t H = a.heads, V = a.value_width;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < at.rows * H; i++) read(i / H, i % H, &work.joined[i * V]);
    whole(work.joined.data(), at.rows, H * V, work);
    multiply(a.output, at.rows, work.bytes.data(), work.scale.data(), work.out.data(), at.width);
#pragma omp barrier
}

float* scores(int64_t count) {
    static thread_local std::vector<float> room;
    if ((int64_t)room.size() < count) room.resize(2 * count);
    return room.data();
}

void own_attention(const Attention& a, const Rows& at, uint16_t* kept, Work& work) {
    const int64_t H = a.heads, G = a.key_heads, K = a.key_width, V = a.value_width;
    const int64_t kv = G * (K + V), stride = H * K + kv, group = H / G;
    float* wide = work.wide.data();
    int64_t column = 0;
    for (const Linear* part : {&a.query, &a.key, &a.value}) {
        multiply(*part, at.rows, work.bytes.data(), work.scale.data(), wide + column, stride);
        column += part->out;
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t r = 0; r < at.rows; r++) {
        if (a.turn) turn(a, wide + r * stride, H + G, at.table ? at.filled - 1 : at.place[r]);
        halve(wide + r * stride + H * K, kv, kept + (at.base + r) * kv);
    }
    auto read = [&](int64_t r, int64_t h, float* out) {
        const float* query = wide + r * stride + h * K;
        if (at.table) {
            const int32_t* number = at.table + r * at.columns;
            attend(a, query, kept, kv, h / group, at.filled,
                   [=](int64_t s) { return (int64_t)number[s]; }, scores(at.filled), out);
        } else {
            const int64_t from = at.start[r];
            attend(a, query, kept, kv, h / group, at.count[r],
                   [=](int64_t s) { return from + s; }, scores(at.count[r]), out);
        }
    };
    attend_all(a, at, read, work);
}

void cross_attention(const Attention& a, const Rows& at, const uint16_t* memory, Work& work) {
    const int64_t stride = a.query.out, kv = a.key.out + a.value.out, group = a.heads / a.key_heads;
    multiply(a.query, at.rows, work.bytes.data(), work.scale.data(), work.wide.data(), stride);
#pragma omp barrier
    auto read = [&](int64_t r, int64_t h, float* out) {
        const int64_t from = at.memory_start[r], count = at.memory_count[r];
        attend(a, &work.wide[r * stride + h * a.key_width], memory, kv, h / group, count,
               [=](int64_t s) { return from + s; }, scores(count), out);
    };
    attend_all(a, at, read, work);
}

void feed_forward(const Block& block, const Rows& at, Work& work) {
    const int64_t hidden = block.expand.out, stride = block.gated ? 2 * hidden : hidden;
    float* wide = work.wide.data();
    multiply(block.expand, at.rows, work.bytes.data(), work.scale.data(), wide, stride);
    if (block.gated)
        multiply(block.gate, at.rows, work.bytes.data(), work.scale.data(), wide + hidden, stride);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t r = 0; r < at.rows; r++) {
        float* row = wide + r * stride;
        const float* bent = block.gated ? row + hidden : row;
        for (int64_t i = 0; i < hidden; i += 16) {
            const __mmask16 in = first(hidden - i);
            __m512 v = activated(_mm512_maskz_loadu_ps(in, bent + i), block.activation);
            if (block.gated) v = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(in, row + i));
            _mm512_mask_storeu_ps(row + i, in, v);
        }
        whole_row(row, hidden, &work.bytes[r * up(hidden, 4)], &work.scale[r]);
    }
    multiply(block.reduce, at.rows, work.bytes.data(), work.scale.data(), work.out.data(),
             at.width);
#pragma omp barrier
}

Work& prepared(int64_t rows, int64_t width, int64_t joined) {
    static thread_local Work work;
    auto room = [](auto& v, int64_t n) {
        if ((int64_t)v.size() < n) v.resize(n);
    };
    room(work.bytes, rows * up(std::max(width, joined), 4) + 64);
    room(work.scale, rows);
    room(work.wide, rows * width);
    room(work.out, rows * width);
    room(work.joined, rows * joined);
    return work;
}

}  // namespace

extern "C" {

// log Σ_n e^x_rn of every row.
void log_sums(const float* x, int64_t rows, int64_t width, float* sums, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float* row = x + r * width;
        __m512 high = _mm512_set1_ps(-INFINITY);
        for (int64_t i = 0; i < width; i += 16) {
            const __mmask16 in = first(width - i);
            high = _mm512_mask_max_ps(high, in, high, _mm512_maskz_loadu_ps(in, row + i));
        }
        const float most = _mm512_reduce_max_ps(high);
        const __m512 by = _mm512_set1_ps(most > -INFINITY ? most : 0.0f);
        __m512 sum = _mm512_setzero_ps(), bad = _mm512_setzero_ps();
        for (int64_t i = 0; i < width; i += 16) {
            const __mmask16 in = first(width - i);
            const __m512 v = _mm512_sub_ps(_mm512_maskz_loadu_ps(in, row + i), by);
            // What is not a number must not vanish in a maximum.
            bad = _mm512_mask_add_ps(bad, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) & in, bad, v);
            sum = _mm512_mask_add_ps(
                sum, in & _mm512_cmp_ps_mask(v, _mm512_set1_ps(-87.0f), _CMP_GT_OQ), sum,
                exponential(v));
        }
        sums[r] = most + std::log(_mm512_reduce_add_ps(sum)) + _mm512_reduce_add_ps(bad);
    }
}

// The `count` largest of each row, largest first, and of equals the first.
void best(const float* x, int64_t rows, int64_t width, int64_t count, float* values,
          int64_t* places, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float* row = x + r * width;
        float* value = values + r * count;
        int64_t* place = places + r * count;
        int64_t have = 0;
        for (int64_t i = 0; i < width; i += 16) {
            __mmask16 in = first(width - i);
            const __m512 v = _mm512_maskz_loadu_ps(in, row + i);
            if (have == count)
                in &= _mm512_cmp_ps_mask(v, _mm512_set1_ps(value[count - 1]), _CMP_GT_OQ);
            for (; in; in &= in - 1) {
                const int64_t n = i + __builtin_ctz(in);
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
    }
}

// y = x Wᵀ + b for any rows.
void linear(const Linear* given, const float* x, int64_t rows, float* y, int threads) {
    Work& work = prepared(rows, given->in, 0);
#pragma omp parallel num_threads(threads)
    {
        whole(x, rows, given->in, work);
        multiply(*given, rows, work.bytes.data(), work.scale.data(), y, given->out);
    }
}

// The keys and values that each block's cross-attention reads, (blocks, rows, keys and values).
void remember(const Block* blocks, int64_t count, const float* x, int64_t rows, uint16_t* memory,
              int threads) {
    const int64_t width = blocks[0].cross.key.in;
    const int64_t held = blocks[0].cross.key.out + blocks[0].cross.value.out;
    Work& work = prepared(rows, std::max(width, held), 0);
#pragma omp parallel num_threads(threads)
    {
        whole(x, rows, width, work);
        float* wide = work.wide.data();
        for (int64_t n = 0; n < count; n++) {
            const Attention& a = blocks[n].cross;
            const int64_t kv = a.key.out + a.value.out;
            multiply(a.key, rows, work.bytes.data(), work.scale.data(), wide, kv);
            multiply(a.value, rows, work.bytes.data(), work.scale.data(), wide + a.key.out, kv);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++)
                halve(wide + r * kv, kv, memory + (n * rows + r) * kv);
        }
    }
}

// All blocks, one after the other, and at their end a norm and the output's product, where given.
void run(const Block* blocks, int64_t count, const Rows* given, const Norm* last,
         const Linear* output, float* logits, int threads) {
    const Rows at = *given;
    const Norm none = {nullptr, nullptr, 0};
    int64_t widest = at.width, joined = 0;
    for (int64_t n = 0; n < count; n++) {
        const Block& b = blocks[n];
        const int64_t all = b.own.query.out + b.own.key.out + b.own.value.out;
        widest = std::max({widest, all, b.expand.out + b.gate.out, b.cross.query.out});
        joined = std::max({joined, b.own.output.in, b.cross.output.in});
    }
    Work& work = prepared(at.rows, widest, joined);
    if (at.table)
        for (int64_t r = 0; r < at.rows; r++)
            at.table[r * at.columns + at.filled - 1] = (int32_t)(at.base + r);
#pragma omp parallel num_threads(threads)
    {
        settle(at, nullptr, none, count && blocks[0].pre ? blocks[0].own_norm : none, work);
        for (int64_t n = 0; n < count; n++) {
            const Block& b = blocks[n];
            const bool pre = b.pre;
            const Norm& next = n + 1 < count && pre ? blocks[n + 1].own_norm : none;
            own_attention(b.own, at, at.kept + n * at.room * (b.own.key.out + b.own.value.out),
                          work);
            settle(at, work.out.data(), pre ? none : b.own_norm,
                   !pre ? none : b.has_cross ? b.cross_norm : b.last_norm, work);
            if (b.has_cross) {
                const int64_t kv = b.cross.key.out + b.cross.value.out;
                cross_attention(b.cross, at, at.memory + n * at.places * kv, work);
                settle(at, work.out.data(), pre ? none : b.cross_norm, pre ? b.last_norm : none,
                       work);
            }
            feed_forward(b, at, work);
            settle(at, work.out.data(), pre ? none : b.last_norm, next, work);
        }
        if (last->gain) settle(at, nullptr, *last, none, work);
        if (output)
            multiply(*output, at.rows, work.bytes.data(), work.scale.data(), logits, output->out);
    }
}
}
