// What the C++ ops share: numbers as they are stored, registers of floats, and torch's threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for machines that put the low half of a word first"
#endif

namespace hf_paged {

#if defined(__AVX512F__)
constexpr int W = 16, WIDE = 4;
#elif defined(__AVX2__)
constexpr int W = 8, WIDE = 2;
#else
constexpr int W = 4, WIDE = 2;
#endif
// W floats fill a register; WIDE registers of a value are summed at once.

typedef float Vec __attribute__((vector_size(W * 4)));
typedef uint32_t Bits __attribute__((vector_size(W * 4)));

// ---- how numbers are stored

inline float as_float(uint32_t bits) {
    float to;
    std::memcpy(&to, &bits, 4);
    return to;
}

inline uint32_t as_bits(float from) {
    uint32_t to;
    std::memcpy(&to, &from, 4);
    return to;
}

// Two halves of a word become floats by a shift and a mask, so registers hold first the even numbers of 2 W, then the odd ones.
// Sums over them do not care, and `place` says where a number went.
struct Float32 {
    typedef float Stored;
    static constexpr int64_t Together = W;  // numbers that are read at once
    static int64_t place(int64_t d) { return d; }
    static void read(const float* from, float* to) { std::memcpy(to, from, W * 4); }
    static float one(float from) { return from; }
    static float store(float from) { return from; }
};

struct Halves {
    typedef uint16_t Stored;
    static constexpr int64_t Together = 2 * W;
    static int64_t place(int64_t d) { return d / (2 * W) * (2 * W) + d % (2 * W) / 2 + d % 2 * W; }
};

struct BFloat16 : Halves {
    static void read(const uint16_t* from, float* to) {
        Bits both;
        std::memcpy(&both, from, sizeof(both));
        Bits even = both << 16, odd = both & 0xffff0000u;
        std::memcpy(to, &even, sizeof(even));
        std::memcpy(to + W, &odd, sizeof(odd));
    }
    static float one(uint16_t from) { return as_float(uint32_t(from) << 16); }
    static uint16_t store(float from) {
        uint32_t bits = as_bits(from);
        if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
        return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

struct Float16 : Halves {
    // bits: a half in the upper half of each word. The exponent is put right by a product, which lifts subnormal halves too.
    static Vec wide(Bits bits) {
        Bits size = bits >> 3 & 0x0fffe000u;
        Bits endless = (Bits)(size >= 0x0f800000u) & 0x7f800000u;
        return (Vec)((Bits)((Vec)size * 0x1p112f) | endless | (bits & 0x80000000u));
    }
    static void read(const uint16_t* from, float* to) {
        Bits both;
        std::memcpy(&both, from, sizeof(both));
        Vec even = wide(both << 16), odd = wide(both);
        std::memcpy(to, &even, sizeof(even));
        std::memcpy(to + W, &odd, sizeof(odd));
    }
    static float one(uint16_t from) {
        uint32_t size = uint32_t(from & 0x7fff) << 13, value = as_bits(as_float(size) * 0x1p112f);
        return as_float(value | (size >= 0x0f800000 ? 0x7f800000 : 0) | uint32_t(from & 0x8000) << 16);
    }
    static uint16_t store(float from) {
        uint32_t bits = as_bits(from), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
        if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
        if (size >= 0x47800000) return uint16_t(sign | 0x7c00);
        if (size < 0x38800000) return uint16_t(sign | (as_bits(as_float(size) + 0.5f) - 0x3f000000));
        return uint16_t(sign | (size + 0xc8000fff + (size >> 13 & 1)) >> 13);
    }
};

// ---- registers

inline int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

inline Vec load(const float* from) {
    Vec to;
    std::memcpy(&to, from, sizeof(to));
    return to;
}
inline void store(float* to, Vec from) { std::memcpy(to, &from, sizeof(from)); }

template <int... Lane>
inline Vec pick(Vec a, Vec b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, Lane...);
#else
    typedef int32_t Index __attribute__((vector_size(W * 4)));
    return __builtin_shuffle(a, b, Index{Lane...});
#endif
}

// In lanes whose bit `Far` is clear the sum of one's lane and its partner, in the others the same of two.
template <int Far, int... Lane>
inline Vec fold(Vec one, Vec two, std::integer_sequence<int, Lane...>) {
    return pick<(Lane & Far ? W + Lane : Lane)...>(one, two) + pick<(Lane & Far ? W + Lane - Far : Lane + Far)...>(one, two);
}

template <int Far>
inline void fold_all(Vec* sums) {
#pragma GCC unroll 16
    for (int i = 0; i < Far; i++) sums[i] = fold<Far>(sums[i], sums[i + Far], std::make_integer_sequence<int, W>());
    if constexpr (Far > 1) fold_all<Far / 2>(sums);
}

// Lane i of the answer is the sum of all lanes of sums[i].
inline Vec total_of_each(Vec* sums) {
    fold_all<W / 2>(sums);
    return sums[0];
}

inline float largest(Vec x) {
    float most = x[0];
    for (int i = 1; i < W; i++) most = x[i] > most ? x[i] : most;
    return most;
}

inline float total(Vec x) {
    float sum = 0;
    for (int i = 0; i < W; i++) sum += x[i];
    return sum;
}

// e^x for x <= 88; 0 below -87. Within 2e-7 of it.
inline Vec exponential(Vec x) {
    const float shift = 0x1.8p23f;
    Vec turns = x * 1.44269504f + shift;
    Vec whole = turns - shift;
    Vec rest = x - whole * 0x1.62e4p-1f;  // ln 2 in two parts, the first short enough that the product is exact
    rest = rest - whole * 0x1.7f7d1cf79abcap-20f;
    Vec sum = rest * (1.0f / 5040) + 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    Vec power = (Vec)(((Bits)turns << 23) + 0x3f800000u);
    return x < -87.0f ? Vec{} : sum * power;
}

// tanh by way of e^2x - 1, whose own series keeps small numbers exact.
inline Vec tangent(Vec x) {
    Vec size = (Vec)((Bits)x & 0x7fffffff) * 2.0f;
    size = size > 40.0f ? Vec{} + 40.0f : size;
    Vec series = size * (1.0f / 40320) + 1.0f / 5040;
    series = series * size + 1.0f / 720;
    series = series * size + 1.0f / 120;
    series = series * size + 1.0f / 24;
    series = series * size + 1.0f / 6;
    series = series * size + 0.5f;
    series = series * size + 1.0f;
    Vec grown = size < 0.7f ? series * size : exponential(size) - 1.0f;
    return (Vec)((Bits)(grown / (grown + 2.0f)) | ((Bits)x & 0x80000000u));
}

// ---- threads: those that torch has

typedef void (*Gomp)(void (*)(void*), void*, unsigned, unsigned);
typedef int32_t (*Torch)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);
inline Gomp gomp = nullptr;
inline Torch torch = nullptr;

template <class Work>
void in_parallel(Work& work, int64_t threads) {
    auto run = [](void* w) { static_cast<Work*>(w)->run(); };
    auto take = [](int64_t, int64_t, void* w) { static_cast<Work*>(w)->run(); };
    if (threads > 1 && gomp)
        gomp(run, &work, unsigned(threads), 0);
    else if (threads < 2 || !torch || torch(0, threads, 1, take, &work))
        work.run();
}

}  // namespace hf_paged
