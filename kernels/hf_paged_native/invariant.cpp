// Batch-invariant operations on a CPU: every number of an answer comes from the same operations in the same order, whatever else is
// in the batch, wherever it lies and however many threads compute.
//
// Sums over features go lane by lane, in an order that the number of features decides. Sums over tokens (softmax, weighted values) go
// token by token, and a masked token adds nothing, so neither padding nor its place matters. Every inner loop has one form: what does not fill
// it is filled up and thrown away, never computed by other code.

#include <vector>

#include "registers.h"

using namespace hf_paged;

extern "C" {

// out[b][m][n] = x[b][m] . w[b][n] (+ bias[n]), lane by lane, where w is [batches, columns, depth]; or if `one_by_one`, where w is
// [batches, depth, columns], number by number. The last dimension of x, w and out is dense; strides are in elements.
struct Product {
    const void *x, *w, *bias;  // bias may be null
    void* out;
    int64_t batches, rows, columns, depth;
    int64_t x_batch, x_row, w_batch, w_row, one_by_one;
    int64_t dtype;  // 0 float32, 1 bfloat16, 2 float16
    int64_t threads;
};

// out [batches, heads, tokens, value_dim], dense: attention of query [batches, heads, tokens, key_dim] over keys and values [batches,
// heads / group, columns, dim]. Strides are in elements, the last dimension is dense.
struct Attention {
    const void *query, *keys, *values;
    const void* mask;    // null, bytes (1 is seen) or floats that are added, by `mask_kind` 0, 1 or 2
    const float* sinks;  // null or [heads]: scores that only take weight
    void* out;
    int64_t batches, heads, group, tokens, columns, key_dim, value_dim;
    int64_t query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token;
    int64_t mask_kind, mask_batch, mask_head, mask_token, mask_column;
    int64_t causal;  // whether token i sees columns 0 to i only
    int64_t dtype;
    int64_t threads;
    float scale, softcap;  // softcap 0: none
};
}

namespace {

#if defined(__AVX512F__)
constexpr int COLUMNS = 4;
#else
constexpr int COLUMNS = 2;  // half the registers
#endif
constexpr int ROWS = 4;         // rows and columns whose sums are kept in registers
constexpr int64_t BLOCK = 64;   // rows, and columns, of a piece of work
constexpr int64_t QUERIES = 8;  // queries that read a key together
constexpr int64_t PIECE = 512;  // numbers that are mapped at once

// `dim` stored numbers as floats, filled up with zeros to `whole`. Halves change places inside a register, all in the same way.
template <class T>
void widen(const typename T::Stored* from, int64_t dim, int64_t whole, float* to) {
    int64_t d = 0;
    for (; d + T::Together <= dim; d += T::Together) T::read(from + d, to + d);
    if (d < dim) {
        std::fill(to + d, to + whole, 0.0f);
        for (int64_t i = d; i < dim; i++) to[d + T::place(i - d)] = T::one(from[i]);
    }
}

// sums[r][c] = x[r] . w[c] over `whole` floats, in the order of lanes.
__attribute__((noinline)) void dots(const float* const* x, const float* const* w, int64_t whole, float (*sums)[COLUMNS]) {
    Vec kept[ROWS][COLUMNS] = {};
    for (int64_t d = 0; d < whole; d += W) {
        Vec other[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) other[c] = load(w[c] + d);
        for (int r = 0; r < ROWS; r++) {
            Vec one = load(x[r] + d);
            for (int c = 0; c < COLUMNS; c++) kept[r][c] += one * other[c];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = total(kept[r][c]);
}

// sums[r][v] += x[r][k] * w[k][v] for k = 0, 1, ..., where rows of w are WIDE registers.
__attribute__((noinline)) void combine(const float* const* x, const float* w, int64_t depth, Vec (*sums)[WIDE]) {
    Vec kept[ROWS][WIDE] = {};
    for (int64_t k = 0; k < depth; k++) {
        Vec other[WIDE];
        for (int v = 0; v < WIDE; v++) other[v] = load(w + (k * WIDE + v) * W);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < WIDE; v++) kept[r][v] += other[v] * x[r][k];
    }
    std::memcpy(sums, kept, sizeof(kept));
}

template <class T>
struct Products {
    typedef typename T::Stored Stored;
    const Product& p;
    std::atomic<int64_t> next{0};

    int64_t row_blocks() const { return (p.rows + BLOCK - 1) / BLOCK; }
    int64_t column_blocks() const { return (p.columns + BLOCK - 1) / BLOCK; }
    int64_t pieces() const { return p.batches * row_blocks() * column_blocks(); }

    void run() {
        int64_t whole = up_to(p.depth, T::Together);
        std::vector<float> x(BLOCK * whole), w(p.one_by_one ? p.depth * WIDE * W : COLUMNS * whole);
        for (int64_t i, last = -1; (i = next.fetch_add(1)) < pieces();) {
            int64_t column = i % column_blocks() * BLOCK, block = i / column_blocks();
            int64_t row = block % row_blocks() * BLOCK, batch = block / row_blocks();
            int64_t rows = std::min(BLOCK, p.rows - row), end = std::min(column + BLOCK, p.columns);
            if (block != last)
                for (int64_t r = 0; r < rows; r++) {
                    const Stored* from = static_cast<const Stored*>(p.x) + batch * p.x_batch + (row + r) * p.x_row;
                    if (p.one_by_one)
                        for (int64_t k = 0; k < p.depth; k++) x[r * whole + k] = T::one(from[k]);
                    else
                        widen<T>(from, p.depth, whole, &x[r * whole]);
                }
            last = block;
            if (p.one_by_one)
                for (int64_t c = column; c < end; c += WIDE * W) combined(batch, row, rows, c, std::min(WIDE * W + c, end), whole, x.data(), w.data());
            else
                for (int64_t c = column; c < end; c += COLUMNS) columns(batch, row, rows, c, whole, x.data(), w.data());
        }
    }

    void combined(int64_t batch, int64_t row, int64_t rows, int64_t column, int64_t end, int64_t whole, const float* x, float* w) const {
        for (int64_t k = 0; k < p.depth; k++) {
            const Stored* from = static_cast<const Stored*>(p.w) + batch * p.w_batch + k * p.w_row;
            for (int64_t c = 0; c < WIDE * W; c++) w[k * WIDE * W + c] = column + c < end ? T::one(from[column + c]) : 0.0f;
        }
        for (int64_t r = 0; r < rows; r += ROWS) {
            const float* own[ROWS];
            Vec sums[ROWS][WIDE];
            for (int64_t i = 0; i < ROWS; i++) own[i] = x + std::min(r + i, rows - 1) * whole;
            combine(own, w, p.depth, sums);
            for (int64_t i = 0; i < std::min<int64_t>(ROWS, rows - r); i++) {
                Stored* to = static_cast<Stored*>(p.out) + (batch * p.rows + row + r + i) * p.columns;
                for (int64_t c = column; c < end; c++) {
                    float sum = sums[i][(c - column) / W][(c - column) % W];
                    to[c] = T::store(p.bias ? sum + T::one(static_cast<const Stored*>(p.bias)[c]) : sum);
                }
            }
        }
    }

    void columns(int64_t batch, int64_t row, int64_t rows, int64_t column, int64_t whole, const float* x, float* room) const {
        int64_t count = std::min<int64_t>(COLUMNS, p.columns - column);
        const float* w[COLUMNS];
        for (int64_t c = 0; c < COLUMNS; c++) {
            const Stored* from = static_cast<const Stored*>(p.w) + batch * p.w_batch + (column + std::min(c, count - 1)) * p.w_row;
            w[c] = room + c * whole;
            if constexpr (sizeof(Stored) == 4)
                if (p.depth == whole) w[c] = from;
            if (w[c] == room + c * whole) widen<T>(from, p.depth, whole, room + c * whole);
        }
        for (int64_t r = 0; r < rows; r += ROWS) {
            const float* own[ROWS];
            float sums[ROWS][COLUMNS];
            for (int64_t i = 0; i < ROWS; i++) own[i] = x + std::min(r + i, rows - 1) * whole;
            dots(own, w, whole, sums);
            for (int64_t i = 0; i < std::min<int64_t>(ROWS, rows - r); i++) {
                Stored* to = static_cast<Stored*>(p.out) + (batch * p.rows + row + r + i) * p.columns + column;
                for (int64_t c = 0; c < count; c++)
                    to[c] = T::store(p.bias ? sums[i][c] + T::one(static_cast<const Stored*>(p.bias)[column + c]) : sums[i][c]);
            }
        }
    }
};

// Numbers become e^(number - less); `whole` is a multiple of W.
__attribute__((noinline)) void exponentials(float* numbers, int64_t whole, float less) {
    for (int64_t i = 0; i < whole; i += W) store(numbers + i, exponential(load(numbers + i) - less));
}

__attribute__((noinline)) void cap(float* numbers, int64_t whole, float most) {
    for (int64_t i = 0; i < whole; i += W) store(numbers + i, tangent(load(numbers + i) / most) * most);
}

// sums[d] += weight * value[d] over `whole` floats.
__attribute__((noinline)) void add_weighted(float* sums, const float* value, float weight, int64_t whole) {
    for (int64_t d = 0; d < whole; d += W) store(sums + d, load(sums + d) + load(value + d) * weight);
}

template <class T>
struct Attending {
    typedef typename T::Stored Stored;
    const Attention& a;
    std::atomic<int64_t> next{0};

    // The query heads of one key head are queries of it, one after the other.
    int64_t queries() const { return a.group * a.tokens; }
    int64_t tiles() const { return (queries() + QUERIES - 1) / QUERIES; }
    int64_t key_heads() const { return a.heads / a.group; }
    int64_t pieces() const { return a.batches * key_heads() * tiles(); }

    void run() {
        int64_t key_dim = up_to(a.key_dim, T::Together), value_dim = up_to(a.value_dim, T::Together), columns = up_to(a.columns, W);
        std::vector<float> asked(up_to(QUERIES, ROWS) * key_dim), weights(QUERIES * columns), sums(QUERIES * value_dim);
        std::vector<float> tile(std::max(COLUMNS * key_dim, value_dim));
        for (int64_t i; (i = next.fetch_add(1)) < pieces();) {
            int64_t first = i % tiles() * QUERIES, head = i / tiles() % key_heads(), batch = i / tiles() / key_heads();
            int64_t count = std::min(QUERIES, queries() - first);
            for (int64_t q = 0; q < up_to(QUERIES, ROWS); q++) {
                int64_t at = first + std::min(q, count - 1), query_head = head * a.group + at / a.tokens;
                widen<T>(static_cast<const Stored*>(a.query) + batch * a.query_batch + query_head * a.query_head + at % a.tokens * a.query_token,
                         a.key_dim, key_dim, &asked[q * key_dim]);
            }
            int64_t seen = a.causal ? std::min(a.columns, last_token(first, count) + 1) : a.columns;
            score(batch, head, count, seen, key_dim, columns, asked.data(), weights.data(), tile.data());
            float totals[QUERIES];
            for (int64_t q = 0; q < count; q++) totals[q] = soften(batch, head, first + q, seen, &weights[q * columns]);
            weigh(batch, head, count, seen, value_dim, columns, weights.data(), sums.data(), tile.data());
            for (int64_t q = 0; q < count; q++) {
                int64_t at = first + q, query_head = head * a.group + at / a.tokens;
                Stored* to = static_cast<Stored*>(a.out) + ((batch * a.heads + query_head) * a.tokens + at % a.tokens) * a.value_dim;
                for (int64_t d = 0; d < a.value_dim; d++) {
                    int64_t from = d / T::Together * T::Together + T::place(d % T::Together);
                    to[d] = T::store(totals[q] == 0 ? 0 : sums[q * value_dim + from] / totals[q]);
                }
            }
        }
    }

    int64_t last_token(int64_t first, int64_t count) const {
        int64_t last = 0;
        for (int64_t q = first; q < first + count; q++) last = std::max(last, q % a.tokens);
        return last;
    }

    void score(int64_t batch, int64_t head, int64_t count, int64_t seen, int64_t key_dim, int64_t columns, const float* asked, float* weights,
               float* tile) const {
        const Stored* keys = static_cast<const Stored*>(a.keys) + batch * a.key_batch + head * a.key_head;
        for (int64_t t = 0; t < seen; t += COLUMNS) {
            const float* key[COLUMNS];
            for (int64_t c = 0; c < COLUMNS; c++) {
                widen<T>(keys + std::min(t + c, seen - 1) * a.key_token, a.key_dim, key_dim, tile + c * key_dim);
                key[c] = tile + c * key_dim;
            }
            for (int64_t q = 0; q < count; q += ROWS) {
                const float* own[ROWS];
                float sums[ROWS][COLUMNS];
                for (int64_t i = 0; i < ROWS; i++) own[i] = asked + (q + i) * key_dim;
                dots(own, key, key_dim, sums);
                for (int64_t i = 0; i < std::min<int64_t>(ROWS, count - q); i++)
                    for (int64_t c = 0; c < std::min<int64_t>(COLUMNS, seen - t); c++) weights[(q + i) * columns + t + c] = sums[i][c];
            }
        }
    }

    // Scores of one query become weights, 0 for what it does not see; their sum, token by token.
    float soften(int64_t batch, int64_t head, int64_t at, int64_t seen, float* weights) const {
        int64_t query_head = head * a.group + at / a.tokens, token = at % a.tokens, whole = up_to(seen, W);
        for (int64_t t = 0; t < seen; t++) weights[t] *= a.scale;
        std::fill(weights + seen, weights + whole, 0.0f);
        if (a.softcap > 0) cap(weights, whole, a.softcap);
        int64_t place = batch * a.mask_batch + query_head * a.mask_head + token * a.mask_token;
        const uint8_t* shown = static_cast<const uint8_t*>(a.mask) + place;
        const float* added = static_cast<const float*>(a.mask) + place;
        if (a.mask_kind == 2)
            for (int64_t t = 0; t < seen; t++) weights[t] += added[t * a.mask_column];
        if (a.mask_kind == 1)
            for (int64_t t = 0; t < seen; t++) weights[t] = shown[t * a.mask_column] ? weights[t] : -INFINITY;
        if (a.causal) std::fill(weights + std::min(token + 1, seen), weights + seen, -INFINITY);
        std::fill(weights + seen, weights + whole, -INFINITY);
        float most = a.sinks ? a.sinks[query_head] : -INFINITY;
        for (int64_t t = 0; t < seen; t++) most = weights[t] > most ? weights[t] : most;
        if (most == -INFINITY) {
            std::fill(weights, weights + whole, 0.0f);
            return 0;
        }
        exponentials(weights, whole, most);
        float sum = a.sinks ? std::exp(a.sinks[query_head] - most) : 0.0f;
        for (int64_t t = 0; t < seen; t++) sum += weights[t];
        return sum;
    }

    void weigh(int64_t batch, int64_t head, int64_t count, int64_t seen, int64_t value_dim, int64_t columns, const float* weights, float* sums,
               float* tile) const {
        const Stored* values = static_cast<const Stored*>(a.values) + batch * a.value_batch + head * a.value_head;
        std::fill(sums, sums + count * value_dim, 0.0f);
        for (int64_t t = 0; t < seen; t++) {
            bool read = false;
            for (int64_t q = 0; q < count; q++) {
                float weight = weights[q * columns + t];
                if (weight == 0) continue;
                if (!read) widen<T>(values + t * a.value_token, a.value_dim, value_dim, tile);
                read = true;
                add_weighted(sums + q * value_dim, tile, weight, value_dim);
            }
        }
    }
};

// ---- rows

enum Row { SUM, SOFTMAX, LOG_SOFTMAX, LOGSUMEXP };

// Sum of `whole` floats, lane by lane.
__attribute__((noinline)) float sum_of(const float* numbers, int64_t whole) {
    Vec sum = {};
    for (int64_t i = 0; i < whole; i += W) sum += load(numbers + i);
    return total(sum);
}

struct Rows {
    int64_t kind;
    const float* x;
    float* out;
    int64_t rows, width;
    std::atomic<int64_t> next{0};

    void run() {
        int64_t whole = up_to(width, W);
        std::vector<float> room(whole);
        for (int64_t i; (i = next.fetch_add(1)) < rows;) one(x + i * width, whole, room.data(), i);
    }

    void one(const float* from, int64_t whole, float* room, int64_t row) const {
        std::copy(from, from + width, room);
        std::fill(room + width, room + whole, kind == SUM ? 0.0f : -INFINITY);
        if (kind == SUM) {
            out[row] = sum_of(room, whole);
            return;
        }
        float most = -INFINITY;
        for (int64_t i = 0; i < width; i++) most = from[i] > most || from[i] != from[i] ? from[i] : most;
        exponentials(room, whole, most == -INFINITY ? 0.0f : most);
        float sum = 0;
        for (int64_t i = 0; i < width; i++) sum += room[i];
        float log = (most == -INFINITY ? 0.0f : most) + std::log(sum);
        if (kind == SOFTMAX)
            for (int64_t i = 0; i < width; i++) out[row * width + i] = room[i] / sum;
        else if (kind == LOG_SOFTMAX)
            for (int64_t i = 0; i < width; i++) out[row * width + i] = from[i] - log;
        else
            out[row] = log;
    }
};

// ---- numbers one by one

enum Map { EXP, LOG, SIN, COS, TANH, SIGMOID, SILU, GELU, GELU_TANH, ERF, SOFTPLUS, POWER, EXPM1, LOG1P };

struct Maps {
    int64_t kind;
    const float* x;
    float* out;
    int64_t count;
    float parameter;
    std::atomic<int64_t> next{0};

    void run() {
        float room[PIECE];
        for (int64_t i; (i = next.fetch_add(PIECE)) < count;) {
            int64_t here = std::min(PIECE, count - i);
            std::copy(x + i, x + i + here, room);
            std::fill(room + here, room + PIECE, 0.0f);
            map(room, here);
            std::copy(room, room + here, out + i);
        }
    }

    // 1 / (1 + e^-x), by way of e^-|x|, which is at most 1.
    static Vec sigmoid(Vec x) {
        Vec less = exponential((Vec)((Bits)x | 0x80000000u));
        return (x < 0.0f ? less : Vec{} + 1.0f) / (1.0f + less);
    }

    __attribute__((noinline)) void map(float* numbers, int64_t here) const {
        for (int64_t i = 0; i < PIECE; i += W) {
            Vec x = load(numbers + i);
            if (kind == SIGMOID) x = sigmoid(x);
            else if (kind == SILU) x = x * sigmoid(x);
            else if (kind == TANH) x = tangent(x);
            else if (kind == GELU_TANH) x = 0.5f * x * (1.0f + tangent(0.7978845608028654f * (x + 0.044715f * x * x * x)));
            store(numbers + i, x);
        }
        for (int64_t i = 0; i < here; i++) {
            float x = numbers[i];
            if (kind == EXP) x = std::exp(x);
            else if (kind == LOG) x = std::log(x);
            else if (kind == SIN) x = std::sin(x);
            else if (kind == COS) x = std::cos(x);
            else if (kind == GELU) x = 0.5f * x * (1.0f + std::erf(x * 0.7071067811865476f));
            else if (kind == ERF) x = std::erf(x);
            else if (kind == SOFTPLUS) x = x > 20.0f ? x : std::log1p(std::exp(x));
            else if (kind == POWER) x = std::pow(x, parameter);
            else if (kind == EXPM1) x = std::expm1(x);
            else if (kind == LOG1P) x = std::log1p(x);
            numbers[i] = x;
        }
    }
};

template <template <class> class Work, class Given>
void by_dtype(const Given& given, int64_t dtype) {
    auto run = [&](auto work) { in_parallel(*work, std::min(given.threads, work->pieces())); };
    if (dtype == 0) {
        Work<Float32> work{given};
        run(&work);
    } else if (dtype == 1) {
        Work<BFloat16> work{given};
        run(&work);
    } else {
        Work<Float16> work{given};
        run(&work);
    }
}

}  // namespace

extern "C" {

void hf_paged_product(const Product* product) { by_dtype<Products>(*product, product->dtype); }

void hf_paged_attend_dense(const Attention* attention) { by_dtype<Attending>(*attention, attention->dtype); }

// x [rows, width] to out [rows], or [rows, width] of a softmax; floats, dense.
void hf_paged_rows(int64_t kind, const float* x, float* out, int64_t rows, int64_t width, int64_t threads) {
    Rows work{kind, x, out, rows, width};
    in_parallel(work, std::min(threads, rows));
}

// x [count] to out [count]; floats, dense.
void hf_paged_map(int64_t kind, const float* x, float* out, int64_t count, float parameter, int64_t threads) {
    Maps work{kind, x, out, count, parameter};
    in_parallel(work, std::min(threads, (count + PIECE - 1) / PIECE));
}
}
