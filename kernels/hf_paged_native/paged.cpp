// Paged attention for a few query tokens a row, and the write of a step's keys and values, on a CPU.
//
// Plain C++17 with the vector types of gcc and clang; no header of torch or Python, so it builds in seconds and one binary serves
// every release of both. Whoever calls (plan.py) owns every byte: tensors, tables, scratch. Storage may be
// float32, bfloat16 or float16; every sum is float32.
//
// A row's tokens are cut into chunks. Each chunk gives its own softmax, and the last thread that finishes a piece of a row puts
// them together in order: the answer is the same bits for any number of threads, any neighbours and any place of the blocks. Rows
// that begin with the same blocks may be groups, whose chunks are read once for all members.

#include "registers.h"

using namespace hf_paged;

extern "C" {

// Groups of rows that read the first tokens of their tables together, as numbers that stand side by side: entry i of them describes
// group i + 1, names the innermost group of row i, and has places 2 i and 2 i + 1 of the list of all members. Group 0 is none.
struct Group {
    int32_t first, members;  // where its members begin in the list, and how many they are
    int32_t begin, end;      // its tokens; those before `begin` are the group's around it
    int32_t around;
    int32_t inner;      // of row i
    int32_t listed[2];  // of the list
};

// What the layers of one shape have in common in one step. Strides are in elements; the last dimension is dense everywhere.
struct Step {
    const int32_t* table;    // [rows, width]: block ids
    const int32_t* lengths;  // [rows]: tokens of each row, this step's included
    const Group* groups;     // [rows] or null; for tokens that see all before them
    float* scratch;          // hf_paged_scratch(step) floats, on a cache line
    int64_t rows, width, block_size, tokens, heads, group, key_dim, value_dim;
    int64_t key_slot, key_head, value_slot, value_head;  // strides of the pools
    int64_t window;  // how far back a token sees, itself included; 0: all the way
    int64_t causal;  // whether a token sees only what is at or before it
    int64_t dtype;   // 0 float32, 1 bfloat16, 2 float16
    int64_t threads;
};

// Strides of a tensor [rows, heads, tokens, dim].
struct Strides {
    int64_t row, head, token;
};
}

namespace {

constexpr int64_t CHUNK = 512;  // tokens whose scores are held at once, and the smallest piece of work of a thread
constexpr int64_t TILE = 32;    // tokens whose values stay in the nearest cache while the query heads take turns
constexpr int64_t LINE = 64;    // bytes of a cache line
constexpr int64_t KEYS = 24;    // common tokens whose keys stay in the nearest cache
constexpr int64_t VALUES = 128; // and whose values stay in the next one
constexpr int64_t LANES = 128;  // query rows that read common tokens at once
constexpr int64_t LEVELS = 2;   // groups that a row is in at most

// ---- small products

// Scores of W tokens: lane t is query . keys[t]; dim is a multiple of W.
template <int Many>
inline void add_products(Vec* sums, const float* const* keys, const float* query) {
    Vec part[Many];
    for (int v = 0; v < Many; v++) part[v] = load(query + v * W);
#pragma GCC unroll 16
    for (int t = 0; t < W; t++)
        for (int v = 0; v < Many; v++) sums[t] += part[v] * load(keys[t] + v * W);
}

inline Vec scores_of(const float* const* keys, const float* query, int64_t dim) {
    Vec sums[W] = {};
    const float* at[W];
    for (int t = 0; t < W; t++) at[t] = keys[t];
    int64_t d = 0;
    for (; d + 4 * W <= dim; d += 4 * W) {
        add_products<4>(sums, at, query + d);
        for (int t = 0; t < W; t++) at[t] += 4 * W;
    }
    for (; d < dim; d += W) {
        add_products<1>(sums, at, query + d);
        for (int t = 0; t < W; t++) at[t] += W;
    }
    return total_of_each(sums);
}

// sums[m][d..] += weights[m][t] * values[t][d..] for `Rows` query rows and `Many` registers; meanwhile the same of `soon` is fetched.
template <int Rows, int Many, int Size>
inline void add_values(float* sums, int64_t dim, const float* weights, int64_t stride, const float* const* values, int64_t d, int64_t count,
                       const char* const* soon) {
    Vec kept[Rows][Many];
    for (int m = 0; m < Rows; m++)
        for (int v = 0; v < Many; v++) kept[m][v] = load(sums + m * dim + d + v * W);
    for (int64_t t = 0; t < count; t++) {
        if (soon)
            for (int64_t line = 0; line < Many * W * Size; line += LINE) __builtin_prefetch(soon[t] + d * Size + line);
        Vec value[Many];
        for (int v = 0; v < Many; v++) value[v] = load(values[t] + d + v * W);
        for (int m = 0; m < Rows; m++)
            for (int v = 0; v < Many; v++) kept[m][v] += value[v] * weights[m * stride + t];
    }
    for (int m = 0; m < Rows; m++)
        for (int v = 0; v < Many; v++) store(sums + m * dim + d + v * W, kept[m][v]);
}

// Numbers [rows, width] may lie in panels: WIDE registers of every row, one row after the other, then the next registers; at last
// single ones. The panel of column d begins at d * rows.
inline int64_t panel(int64_t width, int64_t d) { return width - d >= WIDE * W ? WIDE * W : W; }

// sums[r][..] = left[r * row + k * step] * right[k][..] over k < count, for `Rows` rows and a panel of `Many` registers; `more`: added.
template <int Rows, int Many>
void multiply(float* sums, int64_t across, const float* left, int64_t row, int64_t step, const float* right, int64_t count, bool more) {
    Vec kept[Rows][Many];
#pragma GCC unroll 6
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < Many; v++) kept[r][v] = more ? load(sums + r * across + v * W) : Vec{};
    for (int64_t k = 0; k < count; k++, left += step, right += Many * W) {
        Vec other[Many];
#pragma GCC unroll 4
        for (int v = 0; v < Many; v++) other[v] = load(right + v * W);
#pragma GCC unroll 6
        for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < Many; v++) kept[r][v] += other[v] * left[r * row];
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < Many; v++) store(sums + r * across + v * W, kept[r][v]);
}

// The same for any number of rows; `wide`: whether the panel has WIDE registers or one.
inline void multiply_rows(bool wide, int64_t rows, float* sums, int64_t across, const float* left, int64_t row, int64_t step,
                          const float* right, int64_t count, bool more) {
    for (int64_t r = 0, many; r < rows; r += many) {
        many = rows - r >= 6 ? 6 : rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
        auto add = many == 6   ? wide ? multiply<6, WIDE> : multiply<6, 1>
                   : many == 4 ? wide ? multiply<4, WIDE> : multiply<4, 1>
                   : many == 2 ? wide ? multiply<2, WIDE> : multiply<2, 1>
                               : wide ? multiply<1, WIDE> : multiply<1, 1>;
        add(sums + r * across, across, left + r * row, row, step, right, count, more);
    }
}

// ---- a piece of work: some heads of one row over one chunk of its tokens

// How the scratch of a step is cut up, and its work.
struct Plan {
    int64_t queries;                    // query rows that one key head serves: its group's heads times the new tokens
    int64_t key_dim, value_dim;         // filled up to whole registers
    int64_t chunks, slots;              // of one row, at most; with those of its groups
    int64_t members, lanes;             // of a group that are served at once, and their query rows in whole registers
    int64_t pieces, heads;              // the heads of a row are cut into pieces of so many
    int64_t tile;                       // floats of tokens that are read
    int64_t partials;                   // floats that a chunk of a row leaves behind
    int64_t finished, shared, own, all; // floats of the rows' counters, of these and all partials, of a thread, of everything

    Plan(const Step& s, int64_t together) {
        queries = s.group * s.tokens;
        key_dim = up_to(s.key_dim, together), value_dim = up_to(s.value_dim, together);
        int64_t seen = s.width * s.block_size;
        if (s.causal && s.window) seen = std::min(seen, s.window - 1 + s.tokens);
        chunks = std::max<int64_t>(1, (seen + CHUNK - 1) / CHUNK);
        slots = chunks + (s.groups ? LEVELS : 0);
        members = std::max<int64_t>(1, LANES / queries);
        lanes = up_to(members * queries, W);
        // All heads of a chunk lie side by side and are read together where there is work for everybody.
        int64_t wanted = s.threads == 1 ? 1 : (3 * s.threads + s.rows * chunks - 1) / (s.rows * chunks);
        heads = (s.heads + std::min(wanted, s.heads) - 1) / std::min(wanted, s.heads);
        pieces = (s.heads + heads - 1) / heads;
        partials = s.heads * queries * (value_dim + W);
        finished = up_to(s.rows, LINE / 4);
        tile = std::max(W * key_dim, TILE * value_dim);
        if (s.groups) tile = std::max(tile, std::max(KEYS * key_dim, (VALUES + 1) * value_dim));
        own = heads * queries * (key_dim + CHUNK) + tile + 2 * CHUNK;
        if (s.groups) own = std::max(own, lanes * (key_dim + CHUNK + value_dim + 2) + tile + 2 * CHUNK);
        own = up_to(own, LINE / 4);
        shared = finished + up_to(s.rows * slots * partials, LINE / 4);
        all = shared + s.threads * own;
    }
};

template <class T>
struct Attention {
    typedef typename T::Stored Stored;
    const Step& s;
    const Stored* query;
    const Stored* keys;
    const Stored* values;
    Stored* out;
    const float* sinks;
    Strides strides;
    float scale, softcap;
    Plan plan;
    std::atomic<int64_t> next{0}, workers{0};

    // Of a row: the first token that it reads by itself, and how many chunks there are from it on.
    int64_t first(int64_t row) const {
        if (s.groups && s.groups[row].inner) return s.groups[s.groups[row].inner - 1].end;
        return s.causal && s.window ? std::max<int64_t>(0, s.lengths[row] - s.tokens - s.window + 1) : 0;
    }
    int64_t chunks(int64_t row) const { return (s.lengths[row] - first(row) + CHUNK - 1) / CHUNK; }

    // Chunks of a row that its groups up to this one read.
    static int64_t chunks(const Group& group) { return (group.end - group.begin + CHUNK - 1) / CHUNK; }
    int64_t common(int64_t group) const {
        int64_t count = 0;
        for (; group; group = s.groups[group - 1].around) count += chunks(s.groups[group - 1]);
        return count;
    }
    int64_t common_of(int64_t row) const { return s.groups ? common(s.groups[row].inner) : 0; }

    float* partial(int64_t row, int64_t slot) const {
        return s.scratch + plan.finished + (row * plan.slots + slot) * plan.partials;
    }
    std::atomic<int32_t>& finished(int64_t row) const { return reinterpret_cast<std::atomic<int32_t>*>(s.scratch)[row]; }

    void finish(int64_t row) const {
        int64_t common = common_of(row), count = chunks(row);
        if (finished(row).fetch_add(1) + 1 == common * s.heads + count * plan.pieces) merge(row, common + count);
    }

    // Pieces of work of a group: one head of some members over one chunk of tokens.
    int64_t pieces(const Group& group) const {
        return (group.members + plan.members - 1) / plan.members * chunks(group) * s.heads;
    }
    int64_t common_pieces() const {
        int64_t total = 0;
        for (int64_t i = 0; s.groups && i < s.rows && s.groups[i].members; i++) total += pieces(s.groups[i]);
        return total;
    }
    int64_t own_pieces() const { return plan.chunks * s.rows * plan.pieces; }

    void run() {
        float* own = s.scratch + plan.shared + workers.fetch_add(1) * plan.own;
        int64_t common = common_pieces(), total = common + own_pieces();
        int64_t group = 0, begin = 0;
        for (int64_t i; (i = next.fetch_add(1)) < total;) {
            if (i < common) {
                for (; i - begin >= pieces(s.groups[group]); group++) begin += pieces(s.groups[group]);
                attend_together(group, i - begin, own);
                continue;
            }
            // Rows that share their first blocks read them one after the other.
            int64_t at = i - common, piece = at % plan.pieces, row = at / plan.pieces % s.rows, chunk = at / plan.pieces / s.rows;
            if (chunk < chunks(row)) {
                attend(row, chunk, piece * plan.heads, std::min(s.heads, (piece + 1) * plan.heads), own);
                finish(row);
            } else if (!s.lengths[row] && !chunk && !piece) {
                merge(row, 0);
            }
        }
    }

    void attend(int64_t row, int64_t chunk, int64_t head, int64_t end, float* own) const {
        int64_t begin = first(row) + chunk * CHUNK, count = std::min<int64_t>(CHUNK, s.lengths[row] - begin);
        float* asked = own;
        float* weights = asked + plan.heads * plan.queries * plan.key_dim;
        float* tile = weights + plan.heads * plan.queries * CHUNK;
        int64_t* slots = reinterpret_cast<int64_t*>(tile + plan.tile);
        find(row, begin, count, slots);
        ask(row, head, end, asked);
        score(slots, count, head, end, asked, weights, tile);
        float* sums = partial(row, common_of(row) + chunk) + head * plan.queries * (plan.value_dim + W);
        for (int64_t m = 0; m < (end - head) * plan.queries; m++)
            soften(weights + m * CHUNK, row, m % s.tokens, begin, count, sums + m * (plan.value_dim + W));
        weigh(slots, count, head, end, weights, sums, tile);
    }

    // A piece of a group's work. The query rows of its members stand side by side, as lanes of registers.
    void attend_together(int64_t index, int64_t piece, float* own) const {
        const Group& group = s.groups[index];
        int64_t head = piece % s.heads, chunk = piece / s.heads % chunks(group), from = piece / s.heads / chunks(group) * plan.members;
        int64_t begin = group.begin + chunk * CHUNK, count = std::min<int64_t>(CHUNK, group.end - begin);
        int64_t members = std::min<int64_t>(plan.members, group.members - from), queries = members * plan.queries;
        int64_t lanes = up_to(queries, W), place = group.first + from;
        float* asked = own;
        float* weights = asked + plan.lanes * plan.key_dim;
        float* sums = weights + plan.lanes * CHUNK;
        float* tops = sums + plan.lanes * plan.value_dim;
        float* totals = tops + plan.lanes;
        float* tile = totals + plan.lanes;
        int64_t* slots = reinterpret_cast<int64_t*>(tile + plan.tile);
        find(member(place), begin, count, slots);
        ask_together(place, queries, head, lanes, asked);
        std::fill(tops, tops + lanes, -INFINITY);
        std::fill(totals, totals + lanes, 0.0f);
        score_together(slots, count, head, lanes, asked, weights, tops, tile);
        weigh_together(slots, count, head, queries, lanes, weights, tops, totals, sums, tile);
        int64_t slot = common(group.around) + chunk, stride = plan.value_dim + W;
        for (int64_t i = 0; i < members; i++) {
            int64_t row = member(place + i);
            float* to = partial(row, slot) + head * plan.queries * stride;
            for (int64_t m = i * plan.queries; m < (i + 1) * plan.queries; m++, to += stride) {
                std::copy(sums + m * plan.value_dim, sums + (m + 1) * plan.value_dim, to);
                to[plan.value_dim] = tops[m];
                to[plan.value_dim + 1] = totals[m];
            }
            finish(row);
        }
    }

    int64_t member(int64_t place) const { return s.groups[place / 2].listed[place % 2]; }

    // `count` queries of a head, of the members from a place in the list on, scaled, as panels [key_dim, lanes].
    void ask_together(int64_t place, int64_t count, int64_t head, int64_t lanes, float* asked) const {
        float by = softcap > 0 ? scale / softcap : scale;
        std::fill(asked, asked + lanes * plan.key_dim, 0.0f);
        for (int64_t begin = 0, width; begin < count; begin += width) {
            width = panel(lanes, begin);
            for (int64_t m = begin; m < std::min(begin + width, count); m++) {
                int64_t row = member(place + m / plan.queries), h = head * s.group + m % plan.queries / s.tokens, j = m % s.tokens;
                const Stored* from = query + row * strides.row + h * strides.head + j * strides.token;
                float* to = asked + begin * plan.key_dim + m - begin;
                for (int64_t d = 0; d < s.key_dim; d++) to[T::place(d) * width] = T::one(from[d]) * by;
            }
        }
    }

    // Scores as panels [tokens, lanes] of CHUNK tokens, and the largest of every lane.
    void score_together(const int64_t* slots, int64_t count, int64_t head, int64_t lanes, const float* asked, float* weights, float* tops,
                        float* tile) const {
        const Stored* pool = keys + head * s.key_head;
        for (int64_t t = 0, here; t < count; t += here) {
            here = std::min(KEYS, count - t);
            for (int64_t i = t; i < t + here; i++) {
                fetch_soon(pool, s.key_slot, slots, i, count, s.key_dim);
                widen(pool + slots[i] * s.key_slot, s.key_dim, plan.key_dim, tile + (i - t) * plan.key_dim);
            }
            for (int64_t m = 0, width; m < lanes; m += width) {
                width = panel(lanes, m);
                float* to = weights + m * CHUNK + t * width;
                multiply_rows(width > W, here, to, width, tile, plan.key_dim, 1, asked + m * plan.key_dim, plan.key_dim, false);
                for (int64_t i = 0; i < width; i += W) cap(to + i, width, here, tops + m + i);
            }
        }
    }

    // Scores become weights; their sums, and those of the values that they weigh, [queries, value_dim].
    void weigh_together(const int64_t* slots, int64_t count, int64_t head, int64_t queries, int64_t lanes, float* weights,
                        const float* tops, float* totals, float* sums, float* tile) const {
        const Stored* pool = values + head * s.value_head;
        float* value = tile + VALUES * plan.value_dim;
        for (int64_t t = 0, here; t < count; t += here) {
            here = std::min(VALUES, count - t);
            for (int64_t i = t; i < t + here; i++) {
                fetch_soon(pool, s.value_slot, slots, i, count, s.value_dim);
                widen(pool + slots[i] * s.value_slot, s.value_dim, plan.value_dim, value);
                for (int64_t d = 0, width; d < plan.value_dim; d += width) {
                    width = panel(plan.value_dim, d);
                    std::copy(value + d, value + d + width, tile + d * here + (i - t) * width);
                }
            }
            for (int64_t m = 0, width; m < lanes; m += width) {
                width = panel(lanes, m);
                float* to = weights + m * CHUNK + t * width;
                for (int64_t i = 0; i < width; i += W) soften_lanes(to + i, width, here, tops + m + i, totals + m + i);
            }
            for (int64_t d = 0, wide, width; d < plan.value_dim; d += wide) {
                wide = panel(plan.value_dim, d);
                for (int64_t m = 0; m < queries; m += width) {
                    width = panel(lanes, m);
                    multiply_rows(wide > W, std::min(width, queries - m), sums + m * plan.value_dim + d, plan.value_dim,
                                  weights + m * CHUNK + t * width, 1, width, tile + d * here, here, t > 0);
                }
            }
        }
    }

    // Ask for a token that comes KEYS later.
    static void fetch_soon(const Stored* pool, int64_t stride, const int64_t* slots, int64_t t, int64_t count, int64_t dim) {
        const char* soon = reinterpret_cast<const char*>(pool + slots[std::min(t + KEYS, count - 1)] * stride);
        for (int64_t byte = 0; byte < dim * int64_t(sizeof(Stored)); byte += LINE) __builtin_prefetch(soon + byte, 0, 2);
    }

    // Scores of W lanes for tokens one after the other, capped, and their largest so far.
    void cap(float* scores, int64_t stride, int64_t count, float* tops) const {
        Vec most = load(tops);
        for (int64_t t = 0; t < count; t++, scores += stride) {
            Vec x = load(scores);
            if (softcap > 0) store(scores, x = tangent(x) * softcap);
            most = x > most ? x : most;
        }
        store(tops, most);
    }

    // Scores of W lanes become weights; their sums so far.
    static void soften_lanes(float* scores, int64_t stride, int64_t count, const float* tops, float* totals) {
        Vec base = load(tops), sum = load(totals);
        base = base == -INFINITY ? Vec{} : base;
        for (int64_t t = 0; t < count; t++, scores += stride) {
            Vec x = exponential(load(scores) - base);
            store(scores, x);
            sum += x;
        }
        store(totals, sum);
    }

    void find(int64_t row, int64_t begin, int64_t count, int64_t* slots) const {
        const int32_t* block = s.table + row * s.width + begin / s.block_size;
        int64_t inside = begin % s.block_size;
        for (int64_t t = 0; t < count; block++, inside = 0)
            for (; inside < s.block_size && t < count; inside++) slots[t++] = *block * s.block_size + inside;
    }

    // The queries of heads head..end as floats, scaled, filled up with zeros.
    void ask(int64_t row, int64_t head, int64_t end, float* asked) const {
        float by = softcap > 0 ? scale / softcap : scale;
        for (int64_t h = head * s.group; h < end * s.group; h++)
            for (int64_t j = 0; j < s.tokens; j++) {
                const Stored* from = query + row * strides.row + h * strides.head + j * strides.token;
                std::fill(asked, asked + plan.key_dim, 0.0f);
                for (int64_t d = 0; d < s.key_dim; d++) asked[T::place(d)] = T::one(from[d]) * by;
                asked += plan.key_dim;
            }
    }

    // Where the tokens of `slots` lie. There is always somewhere to look: behind the last one, that one again.
    static void locate(const Stored* pool, int64_t stride, const int64_t* slots, int64_t count, int64_t room, const Stored** tokens) {
        for (int64_t t = 0; t < room; t++) tokens[t] = pool + slots[std::min(t, count - 1)] * stride;
    }

    // Where one head of `count` tokens can be read as floats in whole registers: in place if they are, else in `tile`.
    static void read(const Stored* const* tokens, int64_t offset, int64_t count, int64_t dim, int64_t whole, float* tile,
                     const float** at) {
        if constexpr (sizeof(Stored) == 4)
            if (dim == whole) {
                for (int64_t t = 0; t < count; t++) at[t] = tokens[t] + offset;
                return;
            }
        for (int64_t t = 0; t < count; t++, tile += whole) {
            widen(tokens[t] + offset, dim, whole, tile);
            at[t] = tile;
        }
    }

    // `dim` stored numbers as floats, filled up with zeros to `whole`.
    static void widen(const Stored* from, int64_t dim, int64_t whole, float* to) {
        int64_t d = 0;
        for (; d + T::Together <= dim; d += T::Together) T::read(from + d, to + d);
        if (d < dim) std::fill(to + d, to + whole, 0.0f);
        for (; d < dim; d++) to[T::place(d)] = T::one(from[d]);
    }

    template <int Count>
    static void fetch(const Stored* const* tokens, int64_t offset, int64_t bytes) {
        for (int t = 0; t < Count; t++) __builtin_prefetch(reinterpret_cast<const char*>(tokens[t] + offset) + bytes);
    }

    // The next tokens are asked for while these are worked on, a line of each at a time.
    void score(const int64_t* slots, int64_t count, int64_t head, int64_t end, const float* asked, float* weights, float* tile) const {
        const Stored* tokens[W];
        const Stored* next[W];
        const float* at[W];
        int64_t bytes = s.key_dim * sizeof(Stored), stride = s.key_head;
        locate(keys, s.key_slot, slots, std::min<int64_t>(W, count), W, next);
        for (int64_t t = 0; t < count; t += W) {
            std::copy(next, next + W, tokens);
            if (t + W < count) {
                locate(keys, s.key_slot, slots + t + W, std::min<int64_t>(W, count - t - W), W, next);
            } else {
                locate(values, s.value_slot, slots, std::min<int64_t>(W, count), W, next);
                stride = s.value_head;
            }
            for (int64_t h = head; h < end; h++) {
                read(tokens, h * s.key_head, W, s.key_dim, plan.key_dim, tile, at);
                for (int64_t i = 0; i < plan.queries; i++) {
                    int64_t m = (h - head) * plan.queries + i;
                    for (int64_t line = i * LINE; line < bytes; line += plan.queries * LINE) fetch<W>(next, h * stride, line);
                    store(weights + m * CHUNK + t, scores_of(at, asked + m * plan.key_dim, plan.key_dim));
                }
            }
        }
    }

    // Scores of one query row over a chunk become weights; their largest score and their sum stand behind its sums.
    void soften(float* weights, int64_t row, int64_t token, int64_t begin, int64_t count, float* sums) const {
        int64_t at = s.lengths[row] - s.tokens + token;
        int64_t from = s.causal && s.window ? at - s.window + 1 - begin : 0, to = s.causal ? at + 1 - begin : count;
        from = std::clamp<int64_t>(from, 0, count), to = std::clamp<int64_t>(to, from, count);
        int64_t whole = up_to(count, W);
        if (softcap > 0)
            for (int64_t t = 0; t < whole; t += W) store(weights + t, tangent(load(weights + t)) * softcap);
        std::fill(weights, weights + from, -INFINITY);
        std::fill(weights + to, weights + whole, -INFINITY);
        Vec most = Vec{} - INFINITY, sum = {};
        for (int64_t t = 0; t < whole; t += W) {
            Vec x = load(weights + t);
            most = x > most ? x : most;
        }
        float top = largest(most), base = top == -INFINITY ? 0 : top;
        for (int64_t t = 0; t < whole; t += W) {
            Vec x = exponential(load(weights + t) - base);
            store(weights + t, x);
            sum += x;
        }
        sums[plan.value_dim] = top;
        sums[plan.value_dim + 1] = total(sum);
    }

    void weigh(const int64_t* slots, int64_t count, int64_t head, int64_t end, const float* weights, float* sums, float* tile) const {
        const Stored* tokens[TILE];
        const Stored* next[TILE];
        const float* at[TILE];
        const char* soon[TILE];
        int64_t stride = plan.value_dim + W;
        int64_t rows = (end - head) * plan.queries;
        for (int64_t m = 0; m < rows; m++) std::fill(sums + m * stride, sums + m * stride + plan.value_dim, 0.0f);
        locate(values, s.value_slot, slots, std::min(TILE, count), TILE, next);
        for (int64_t t = 0; t < count; t += TILE) {
            int64_t here = std::min(TILE, count - t);
            std::copy(next, next + TILE, tokens);
            if (t + TILE < count) locate(values, s.value_slot, slots + t + TILE, std::min(TILE, count - t - TILE), TILE, next);
            for (int64_t h = head; h < end; h++) {
                read(tokens, h * s.value_head, here, s.value_dim, plan.value_dim, tile, at);
                for (int64_t i = 0; i < here; i++) soon[i] = reinterpret_cast<const char*>(next[i] + h * s.value_head);
                int64_t begin = (h - head) * plan.queries, last = begin + plan.queries;
                for (int64_t m = begin, step; m < last; m += step) {
                    step = last - m >= 4 ? 4 : last - m >= 2 ? 2 : 1;
                    auto add = step == 4 ? &Attention::add<4> : step == 2 ? &Attention::add<2> : &Attention::add<1>;
                    (this->*add)(sums + m * stride, weights + m * CHUNK + t, at, here, m == begin ? soon : nullptr);
                }
            }
        }
    }

    template <int Rows>
    void add(float* sums, const float* weights, const float* const* at, int64_t count, const char* const* soon) const {
        constexpr int Size = sizeof(Stored);
        int64_t d = 0, stride = plan.value_dim + W;
        for (; d + WIDE * W <= plan.value_dim; d += WIDE * W)
            add_values<Rows, WIDE, Size>(sums, stride, weights, CHUNK, at, d, count, soon);
        for (; d < plan.value_dim; d += W) add_values<Rows, 1, Size>(sums, stride, weights, CHUNK, at, d, count, soon);
    }

    // Put the chunks of a row and of its groups together: [tokens, query heads, value_dim].
    void merge(int64_t row, int64_t count) const {
        int64_t stride = plan.value_dim + W;
        for (int64_t m = 0; m < s.heads * plan.queries; m++) {
            int64_t h = m / s.tokens, j = m % s.tokens;
            float top = sinks ? sinks[h] : -INFINITY;
            for (int64_t c = 0; c < count; c++) top = std::max(top, partial(row, c)[m * stride + plan.value_dim]);
            float base = top == -INFINITY ? 0 : top, sum = sinks ? std::exp(sinks[h] - base) : 0;
            float* kept = partial(row, 0) + m * stride;
            if (!count) std::fill(kept, kept + plan.value_dim, 0.0f);
            for (int64_t c = 0; c < count; c++) {
                const float* more = partial(row, c) + m * stride;
                float by = std::exp(more[plan.value_dim] - base);
                sum += more[plan.value_dim + 1] * by;
                for (int64_t d = 0; d < plan.value_dim; d++) kept[d] = c ? kept[d] + more[d] * by : kept[d] * by;
            }
            Stored* to = out + ((row * s.tokens + j) * s.heads * s.group + h) * s.value_dim;
            for (int64_t d = 0; d < s.value_dim; d++) to[d] = T::store(sum == 0 ? 0 : kept[T::place(d)] / sum);
        }
    }
};

template <class T>
void attend(const Step& s, const void* query, Strides strides, const void* keys, const void* values, void* out, const float* sinks,
            float scale, float softcap) {
    typedef typename T::Stored Stored;
    Attention<T> work{s, static_cast<const Stored*>(query), static_cast<const Stored*>(keys), static_cast<const Stored*>(values),
                      static_cast<Stored*>(out), sinks, strides, scale, softcap, Plan(s, T::Together)};
    std::memset(s.scratch, 0, s.rows * 4);
    in_parallel(work, std::min<int64_t>(s.threads, work.common_pieces() + work.own_pieces()));
}

// ---- the write of a step's tokens

struct Write {
    const Step& s;
    const char *keys, *values;
    char *key_pool, *value_pool;
    Strides key_strides, value_strides;
    int64_t size;
    std::atomic<int64_t> next{0};

    static constexpr int64_t MANY = 64;  // tokens that a thread takes at once

    void run() {
        int64_t total = s.rows * s.tokens;
        for (int64_t i; (i = next.fetch_add(MANY)) < total;)
            for (int64_t token = i; token < std::min(total, i + MANY); token++) one(token / s.tokens, token % s.tokens);
    }

    void one(int64_t row, int64_t token) const {
        int64_t at = s.lengths[row] - s.tokens + token;
        if (at < 0) return;  // padding takes no slot
        int64_t slot = s.table[row * s.width + at / s.block_size] * s.block_size + at % s.block_size;
        put(keys, key_strides, row, token, key_pool, slot * s.key_slot, s.key_head, s.key_dim);
        put(values, value_strides, row, token, value_pool, slot * s.value_slot, s.value_head, s.value_dim);
    }

    void put(const char* from, Strides strides, int64_t row, int64_t token, char* pool, int64_t to, int64_t head, int64_t dim) const {
        from += (row * strides.row + token * strides.token) * size, pool += to * size;
        if (strides.head == dim && head == dim) {
            std::memcpy(pool, from, s.heads * dim * size);
            return;
        }
        for (int64_t h = 0; h < s.heads; h++) std::memcpy(pool + h * head * size, from + h * strides.head * size, dim * size);
    }
};

}  // namespace

extern "C" {

// The step's answer to what torch has: the entry of its OpenMP runtime, or its own parallel_for; either may be null.
void hf_paged_threads(void* of_gomp, void* of_torch) {
    gomp = reinterpret_cast<Gomp>(of_gomp);
    torch = reinterpret_cast<Torch>(of_torch);
}

int64_t hf_paged_scratch(const Step* step) { return Plan(*step, step->dtype == 0 ? Float32::Together : Halves::Together).all; }

// out [rows, tokens, query heads, value_dim] = softmax(softcap(query keys^T * scale)) values; sinks [query heads] or null only take
// weight. query [rows, query heads, tokens, key_dim]; keys and values: a layer's slots. A token that sees nothing gives 0.
void hf_paged_attend(const Step* step, const void* query, const Strides* strides, const void* keys, const void* values, void* out,
                     const float* sinks, float scale, float softcap) {
    auto run = step->dtype == 0 ? attend<Float32> : step->dtype == 1 ? attend<BFloat16> : attend<Float16>;
    run(*step, query, *strides, keys, values, out, sinks, scale, softcap);
}

// Put keys and values [rows, heads, tokens, dim] of a step into their slots.
void hf_paged_write(const Step* step, const void* keys, const Strides* key_strides, const void* values, const Strides* value_strides,
                    void* key_pool, void* value_pool) {
    Write work{*step, static_cast<const char*>(keys), static_cast<const char*>(values), static_cast<char*>(key_pool),
               static_cast<char*>(value_pool), *key_strides, *value_strides, step->dtype == 0 ? 4 : 2};
    bool large = step->rows * step->tokens > 4 * Write::MANY;
    in_parallel(work, large ? step->threads : 1);
}
}
