// Sixteen floats or 32-bit integers at a time: one register of AVX-512, two of AVX2, four of NEON.
//
// All operations are IEEE's, lanes are summed in one order, and the compiler must not contract
// a * b + c: every instruction set gives the same bits. Of two, larger() and smaller() give the
// second where either is NaN.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))

// Products of matrices keep ROWS x GROUPS vectors of sums in registers. To each lane one instruction
// adds DEPTH products of weights and activations, which are stored with OFFSET added.
#if defined(__AVX512VNNI__)
#include <immintrin.h>
typedef int8_t Activation;
constexpr int BYTES = 64, ROWS = 6, GROUPS = 4, DEPTH = 4, OFFSET = 128;
#elif defined(__AVX2__)
#include <immintrin.h>
typedef int16_t Activation;
constexpr int BYTES = 32, ROWS = 6, GROUPS = 1, DEPTH = 2, OFFSET = 0;
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
typedef int8_t Activation;
constexpr int BYTES = 16, ROWS = 5, GROUPS = 1, DEPTH = 4, OFFSET = 0;
#else
#error "needs AVX-512 VNNI, AVX2 with FMA and F16C, or NEON with dot products"
#endif

constexpr int LANES = BYTES / 4, PARTS = 16 / LANES;
typedef float V __attribute__((vector_size(BYTES)));
typedef int32_t W __attribute__((vector_size(BYTES)));
typedef float Quarter __attribute__((vector_size(16)));

struct Floats {
    V part[PARTS];
};
struct Ints {
    W part[PARTS];
};

#if defined(__AVX512VNNI__)

// Masked by ALL, since GCC 12 warns of what the plain ones leave undefined.
constexpr uint16_t ALL = 0xFFFF;
INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V nearest(V x) { return _mm512_maskz_roundscale_ps(ALL, x, 8); }
INLINE W integers(V x) { return (W)_mm512_maskz_cvtps_epi32(ALL, x); }
INLINE V from_half(const uint16_t* x) {
    return _mm512_maskz_cvtph_ps(ALL, _mm256_loadu_si256((__m256i*)x));
}
INLINE void to_half(V x, uint16_t* y) {
    _mm256_storeu_si256((__m256i*)y, _mm512_maskz_cvtps_ph(ALL, x, 8));
}
INLINE void to_activations(W x, int8_t* y) {
    _mm_storeu_si128((__m128i*)y, _mm512_maskz_cvtepi32_epi8(ALL, (__m512i)x));
}
INLINE bool any(W x) { return _mm512_movepi32_mask((__m512i)x); }
template <int I>
INLINE Quarter quarter(Floats x) {
    return _mm512_maskz_extractf32x4_ps(0xF, x.part[0], I);
}
INLINE W weights(const int8_t* w) { return (W)_mm512_loadu_si512(w); }
// Its first factor is unsigned, which is why activations have an offset.
INLINE W dot(W sum, W x, W w) {
    return (W)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
}

#elif defined(__AVX2__)

INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V nearest(V x) { return _mm256_round_ps(x, 8); }
INLINE W integers(V x) { return (W)_mm256_cvtps_epi32(x); }
INLINE V from_half(const uint16_t* x) { return _mm256_cvtph_ps(_mm_loadu_si128((__m128i*)x)); }
INLINE void to_half(V x, uint16_t* y) { _mm_storeu_si128((__m128i*)y, _mm256_cvtps_ph(x, 8)); }
INLINE void to_activations(W x, int16_t* y) {
    const __m128i low = _mm256_castsi256_si128((__m256i)x);
    _mm_storeu_si128((__m128i*)y, _mm_packs_epi32(low, _mm256_extracti128_si256((__m256i)x, 1)));
}
INLINE bool any(W x) { return _mm256_movemask_epi8((__m256i)x); }
template <int I>
INLINE Quarter quarter(Floats x) {
    return _mm256_extractf128_ps(x.part[I / 2], I % 2);
}
// In 16 bits: products of 8-bit integers saturate in pairs, or cost a third instruction for signs.
INLINE W weights(const int8_t* w) {
    return (W)_mm256_cvtepi8_epi16(_mm_loadu_si128((__m128i*)w));
}
INLINE W dot(W sum, W x, W w) { return sum + (W)_mm256_madd_epi16((__m256i)x, (__m256i)w); }

#else

INLINE V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
INLINE V nearest(V x) { return vrndnq_f32(x); }
INLINE W integers(V x) { return vcvtnq_s32_f32(x); }
INLINE V from_half(const uint16_t* x) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }
INLINE void to_half(V x, uint16_t* y) { vst1_u16(y, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
INLINE void to_activations(W x, int8_t* y) {
    const int16x4_t words = vmovn_s32(x);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    std::memcpy(y, &bytes, 4);
}
INLINE bool any(W x) { return vmaxvq_u32((uint32x4_t)x); }
template <int I>
INLINE Quarter quarter(Floats x) {
    return x.part[I];
}
INLINE W weights(const int8_t* w) { return (W)vld1q_s8(w); }
INLINE W dot(W sum, W x, W w) { return vdotq_s32(sum, (int8x16_t)w, (int8x16_t)x); }

#endif

template <class Type>
INLINE Type load(const void* x) {
    Type y;
    std::memcpy(&y, x, sizeof y);
    return y;
}

#define EACH for (int p = 0; p < PARTS; p++)
#define LIFT(Type, name, arguments, expression) \
    INLINE Type name arguments {                \
        Type y;                                 \
        EACH y.part[p] = expression;            \
        return y;                               \
    }
LIFT(Floats, all, (float x), x - V{})
LIFT(Ints, all, (int32_t x), x - W{})
LIFT(Floats, load, (const float* x), load<V>(x + p * LANES))
LIFT(Floats, widen, (const uint16_t* x), from_half(x + p * LANES))
LIFT(Floats, operator+, (Floats a, Floats b), a.part[p] + b.part[p])
LIFT(Floats, operator-, (Floats a, Floats b), a.part[p] - b.part[p])
LIFT(Floats, operator*, (Floats a, Floats b), a.part[p] * b.part[p])
LIFT(Floats, operator/, (Floats a, Floats b), a.part[p] / b.part[p])
LIFT(Ints, operator+, (Ints a, Ints b), a.part[p] + b.part[p])
LIFT(Ints, operator&, (Ints a, Ints b), a.part[p] & b.part[p])
LIFT(Ints, operator<<, (Ints a, int n), a.part[p] << n)
LIFT(Floats, fma, (Floats a, Floats b, Floats c), fma(a.part[p], b.part[p], c.part[p]))
LIFT(Floats, nearest, (Floats x), nearest(x.part[p]))
LIFT(Ints, integers, (Floats x), integers(x.part[p]))
LIFT(Floats, floats, (Ints x), __builtin_convertvector(x.part[p], V))
LIFT(Ints, bits, (Floats x), (W)x.part[p])
LIFT(Floats, from_bits, (Ints x), (V)x.part[p])
LIFT(Ints, larger, (Ints a, Ints b), a.part[p] > b.part[p] ? a.part[p] : b.part[p])
LIFT(Floats, larger, (Floats a, Floats b), a.part[p] > b.part[p] ? a.part[p] : b.part[p])
LIFT(Floats, smaller, (Floats a, Floats b), a.part[p] < b.part[p] ? a.part[p] : b.part[p])
LIFT(Floats, where_less, (Floats a, Floats b, Floats yes, Floats no),
     a.part[p] < b.part[p] ? yes.part[p] : no.part[p])
#undef LIFT

INLINE void store(Floats x, float* y) { EACH std::memcpy(y + p * LANES, &x.part[p], BYTES); }
INLINE void narrow(Floats x, uint16_t* y) { EACH to_half(x.part[p], y + p * LANES); }
INLINE void narrow(Ints x, Activation* y) { EACH to_activations(x.part[p], y + p * LANES); }
INLINE bool any_larger(Floats x, float than) {
    W found = {};
    EACH found |= x.part[p] > than;
    return any(found);
}
#undef EACH

// Where a row ends within a vector, its first n lanes are in memory; loaded, the others are zero.
#define COLD __attribute__((noinline, cold)) static
COLD Floats load_part(const float* x, int64_t n) {
    float lane[16] = {};
    std::memcpy(lane, x, 4 * n);
    return load(lane);
}
COLD void store_part(Floats x, float* y, int64_t n) {
    float lane[16];
    store(x, lane);
    std::memcpy(y, lane, n > 0 ? 4 * n : 0);
}
INLINE Floats load(const float* x, int64_t n) { return n >= 16 ? load(x) : load_part(x, n); }
INLINE void store(Floats x, float* y, int64_t n) { n >= 16 ? store(x, y) : store_part(x, y, n); }
INLINE Floats keep(Floats x, int64_t n, float rest) {
    const float lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return n >= 16 ? x : where_less(load(lane), all(float(n)), x, all(rest));
}

// body(i, left) for i = 0, 16, ... below n. It is inlined twice, and nothing is cut in the loop.
template <class Body>
INLINE void sweep(int64_t n, const Body& body) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) body(i, int64_t(16));
    if (i < n) body(i, n - i);
}

// Lanes i and i + 8 are added first, then i and i + 4, i + 2, i + 1.
INLINE Quarter quarters(Floats x) {
    return (quarter<0>(x) + quarter<2>(x)) + (quarter<1>(x) + quarter<3>(x));
}
INLINE float sum(Floats x) {
    const Quarter y = quarters(x);
    return (y[0] + y[2]) + (y[1] + y[3]);
}
INLINE Quarter sums(const Floats* x) {
    const Quarter a = quarters(x[0]), b = quarters(x[1]), c = quarters(x[2]), d = quarters(x[3]);
    const Quarter ab = Quarter{a[0], a[1], b[0], b[1]} + Quarter{a[2], a[3], b[2], b[3]};
    const Quarter cd = Quarter{c[0], c[1], d[0], d[1]} + Quarter{c[2], c[3], d[2], d[3]};
    return Quarter{ab[0], ab[2], cd[0], cd[2]} + Quarter{ab[1], ab[3], cd[1], cd[3]};
}
INLINE float most(Floats x) {
    const Quarter a = quarter<0>(x), b = quarter<1>(x), c = quarter<2>(x), d = quarter<3>(x);
    const Quarter ab = a > b ? a : b, cd = c > d ? c : d, y = ab > cd ? ab : cd;
    return std::max(std::max(y[0], y[1]), std::max(y[2], y[3]));
}

template <class... More>
INLINE Floats polynomial(Floats x, float first, More... more) {
    Floats y = all(first);
    for (float c : {more...}) y = fma(y, x, all(c));
    return y;
}

// e^x = 2^n e^r with |r| <= ln 2 / 2, and a polynomial for e^r (Cephes), for x from -87 to 88.
INLINE Floats exponential_within(Floats x) {
    const Floats n = nearest(x * all(1.44269504f));
    const Floats r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x));
    const Floats p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f);
    return (fma(p, r * r, r) + all(1.0f)) * from_bits((integers(n) + all(127)) << 23);
}
// Of any x: beyond, it is the nearest of these.
INLINE Floats exponential(Floats x) {
    return exponential_within(larger(all(-87.0f), smaller(all(88.0f), x)));
}
