// Runs the kernels on numbers from a file and writes all results to another: driver INPUT OUTPUT.
//
// Compiled for several instruction sets, and run by an emulator where need be, it tells whether they
// give the same bits. Sizes are distinct primes, so that no vector is full.

#include KERNELS

#include <cstdio>
#include <list>

namespace {

std::vector<float> numbers, results;
size_t next = 0;
std::list<std::vector<float>> floats_held;
std::list<std::vector<int8_t>> bytes_held;
std::list<std::vector<int32_t>> ints_held;

float* some(int64_t n, float factor = 1.0f, float plus = 0.0f) {
    floats_held.emplace_back(up(n, 64));
    float* x = floats_held.back().data();
    for (int64_t i = 0; i < n; i++) x[i] = numbers[next++ % numbers.size()] * factor + plus;
    return x;
}

Linear layer(int64_t in, int64_t out) {
    const int64_t rows = up(out, COLUMNS), inputs = up(in, DEPTH);
    ints_held.emplace_back(rows);
    bytes_held.emplace_back(rows * inputs);
    for (int64_t n = 0; n < out; n++)
        for (int64_t k = 0; k < in; k++) {
            const float x = numbers[next++ % numbers.size()] * 60.0f;
            const int8_t w = int8_t(std::max(-127.0f, std::min(127.0f, std::nearbyint(x))));
            const int64_t at = (n / COLUMNS * (inputs / DEPTH) + k / DEPTH) * COLUMNS + n % COLUMNS;
            bytes_held.back()[at * DEPTH + k % DEPTH] = w;
            ints_held.back()[n] -= OFFSET * w;
        }
    return {in, out, bytes_held.back().data(), ints_held.back().data(), some(out, 1e-3f, 3e-3f),
            some(out)};
}

Norm norm(int64_t width) { return {some(width, 0.3f, 1.0f), some(width), 1e-5}; }

Attention attention(int64_t width, int64_t heads, int64_t key_heads, int64_t K, int64_t V) {
    return {heads, key_heads, K, V, 0.3, layer(width, heads * K), layer(width, key_heads * K),
            layer(width, key_heads * V), layer(heads * V, width)};
}

void keep(const float* x, int64_t n) { results.insert(results.end(), x, x + n); }

struct Held {
    std::vector<uint16_t> data;
    std::vector<int32_t> table;
    std::vector<int64_t> count;
    Cache cache;

    Held(int64_t blocks, int64_t slot, std::vector<int64_t> counts, int64_t width) : count(counts) {
        const int64_t rows = int64_t(counts.size());
        for (int64_t n = 0; n < rows * width; n++) table.push_back(int32_t(n * 7 % (rows * width)));
        data.resize(blocks * rows * width * slot);
        cache = {data.data(), rows * width, table.data(), width, count.data()};
    }
};

void model(int64_t activation, bool gated, bool pre, bool halves) {
    constexpr int64_t WIDTH = 37, HIDDEN = 53, BLOCKS = 2, TOKENS = 61, PLACES = 23;
    const std::vector<int64_t> lengths = {5, 11, 2};
    std::vector<Block> encoder, decoder;
    for (int64_t n = 0; n < BLOCKS; n++)
        for (bool cross : {false, true}) {
            Block b = {};
            b.self = attention(WIDTH, 6, 3, 10, 17);
            if (cross) b.cross = attention(WIDTH, 4, 2, 19, 13);
            b.expand = layer(WIDTH, HIDDEN);
            if (gated) b.gate = layer(WIDTH, HIDDEN);
            b.reduce = layer(HIDDEN, WIDTH);
            b.self_norm = norm(WIDTH), b.cross_norm = norm(WIDTH);
            b.feed_forward_norm = norm(WIDTH);
            b.pre_norm = pre, b.activation = activation;
            (cross ? decoder : encoder).push_back(b);
        }
    const Norm last = norm(WIDTH), none = {};
    const Linear output = layer(WIDTH, TOKENS);
    const RotaryEmbedding rotary = {some(PLACES * 2 * 4), 4, halves};

    // The encoder reads vectors, and the decoder its result.
    std::vector<int64_t> sequence, position;
    for (size_t r = 0; r < lengths.size(); r++)
        for (int64_t p = 0; p < lengths[r]; p++) sequence.push_back(r), position.push_back(p);
    const int64_t count = int64_t(sequence.size());
    Held own(BLOCKS, slot_width(&encoder[0].self), lengths, PLACES);
    float* x = some(count * WIDTH);
    const int64_t window = pre ? 4 : 0;
    Tokens tokens = {count, WIDTH, 0, window, x, sequence.data(), position.data(), {}, rotary, own.cache, {}};
    run(encoder.data(), BLOCKS, &tokens, pre ? &last : &none, nullptr, nullptr, 2);
    keep(x, count * WIDTH);
    Held memory(BLOCKS, slot_width(&decoder[0].cross), lengths, PLACES);
    Tokens encoded = {count, WIDTH, 0, 0, x, sequence.data(), position.data(), {}, {}, memory.cache, {}};
    project_memory(decoder.data(), BLOCKS, &encoded, 2);

    // A prefill of all tokens but each sequence's last, and then a step.
    std::vector<int64_t> ids, before, at, last_at, last_id;
    for (int64_t t = 0; t < count; t++) {
        const bool ends = t + 1 == count || sequence[t + 1] != sequence[t];
        (ends ? last_id : ids).push_back(t * 7 % TOKENS);
        if (!ends) before.push_back(sequence[t]);
        (ends ? last_at : at).push_back(position[t]);
    }
    Held cache(BLOCKS, slot_width(&decoder[0].self), lengths, PLACES);
    const float *table = some(TOKENS * WIDTH), *place = some(PLACES * WIDTH);
    Tokens prefill = {int64_t(ids.size()), WIDTH, 1, window, nullptr, before.data(), at.data(),
                      {ids.data(), table, place, 3.0}, rotary, cache.cache, memory.cache};
    run(decoder.data(), BLOCKS, &prefill, &last, nullptr, nullptr, 2);
    const int64_t rows[] = {0, 1, 2};
    Tokens step = {3, WIDTH, 1, window, nullptr, rows, last_at.data(),
                   {last_id.data(), table, place, 3.0}, rotary, cache.cache, memory.cache};
    std::vector<float> logits(3 * TOKENS), values(3 * 5);
    run(decoder.data(), BLOCKS, &step, &last, &output, logits.data(), 2);
    keep(logits.data(), 3 * TOKENS);
    for (uint16_t half : cache.data) results.push_back(half);
    for (float& x : logits) x *= 40.0f;
    std::vector<int64_t> found(3 * 5);
    const int64_t banned[] = {2, 3}, most[] = {9, 9, 9}, least[] = {0, 4, 0};
    const Rule rule = {5, 0, 2, banned, most, least};
    best_tokens(logits.data(), 3, TOKENS, &rule, 1, 3, 5, values.data(), found.data(), 2);
    keep(values.data(), 3 * 5);
    for (int64_t n : found) results.push_back(float(n));
}

}  // namespace

int main(int count, char** words) {
    FILE* in = count == 3 ? std::fopen(words[1], "rb") : nullptr;
    if (!in) return 2;
    for (float x; std::fread(&x, 4, 1, in) == 1;) numbers.push_back(x);
    std::fclose(in);
    for (bool pre : {false, true}) {
        model(RELU, false, pre, pre);
        model(GELU, false, pre, !pre);
        model(SILU, true, pre, pre);
    }
    // Integers and their scales at the extremes, and a loop of many chunks.
    for (float size : {1.0f, 1e-40f, 1e-30f, 3e38f}) {
        const Linear one = layer(1021, 131);
        float* x = some(301 * 1021, size);
        std::vector<float> y(301 * 131);
        linear(&one, x, 301, y.data(), 3);
        keep(y.data(), int64_t(y.size()));
    }
    FILE* out = std::fopen(words[2], "wb");
    if (!out) return 2;
    const size_t written = std::fwrite(results.data(), 4, results.size(), out);
    return std::fclose(out) == 0 && written == results.size() ? 0 : 1;
}
