// What a search asks of logits, and beam and greedy search themselves.
//
//     log p_n = logit_n - log Σ_m e^logit_m
//
// Their state is the tensors of search/beam.py, greedy.py and rolling.py, which are changed in place,
// and what is found is the same to the last bit. Rows of a sentence stand one after the other.
// Sentences that are over are passed over: nothing is computed for their rows, wherever they stand.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"

extern "C" {

// Constraints (search/constraints.py).
struct Rule {
    int64_t end, renormalize, count;  // of tokens that are banned
    const int64_t* banned;
    const int64_t *most, *least;  // tokens of each sentence; no least where all of them may end
};

// Where beam search is: W open hypotheses of a sentence, and the best K that have finished.
struct Beams {
    int64_t W, K, columns, horizon;
    const float* penalty;       // of n tokens
    float* open;                // (places, W)
    int64_t *parents, *tokens;  // (places, columns, W)
    float* gains;
    float *scores, *ends;  // (places, K)
    int64_t *lengths, *slots;
    bool* cut;
};

// Where greedy search is.
struct Paths {
    int64_t columns;
    const int64_t* sentence;  // of each place, or null: places themselves
    int64_t* tokens;          // (sentences, columns)
    double* scores;
};

// Sentences are at steps of their own, and have `each` rows.
struct Search {
    int64_t sentences, each;
    const int64_t* place;  // where a sentence's state is; null: all of it in order
    Rule rule;
    const Beams* beams;  // or else
    const Paths* paths;
    int64_t *last, *rows;  // tokens to be read next, and the row that each continues
    int64_t* t;            // of each place, as `over` is
    bool* over;
};
}

namespace {

// The `count` largest of a row, largest first, and of equals the first.
INLINE void largest(const float* row, int64_t width, int64_t count, float* value, int64_t* index) {
    int64_t have = 0;
    for (int64_t n = 0; n < width; n++) {
        if (have == count) {
            while (n + 16 <= width && !any_larger(load(row + n), value[count - 1])) n += 16;
            while (n < width && !(row[n] > value[count - 1])) n++;
            if (n == width) return;
        }
        int64_t at = have < count ? have++ : count - 1;
        for (; at > 0 && row[n] > value[at - 1]; at--) {
            value[at] = value[at - 1];
            index[at] = index[at - 1];
        }
        value[at] = row[n];
        index[at] = n;
    }
}

// log Σ_n e^x_n, where the largest x is known.
INLINE float log_sum(const float* row, int64_t width, float high) {
    const Floats by = all(high > -INFINITY ? high : 0.0f);
    Floats total = all(0.0f);
    sweep(width, [&](int64_t i, int64_t left) {
        const Floats d = keep(load(row + i, left) - by, left, -INFINITY);
        total = total + where_less(d, all(-87.0f), all(0.0f), exponential_within(d));
    });
    return high + float(std::log(double(sum(total))));
}

// log p of the likeliest tokens that are allowed, best first. Banned logits may be overwritten.
INLINE void best(float* row, int64_t width, const Rule& rule, bool early, int64_t count,
                 float* value, int64_t* token) {
    static thread_local std::vector<float> hidden;
    hidden.clear();
    const auto hide = [&](int64_t n) {
        hidden.push_back(row[n]);
        row[n] = -INFINITY;
    };
    for (int64_t i = 0; i < rule.count; i++) hide(rule.banned[i]);
    if (early) hide(rule.end);
    largest(row, width, count, value, token);
    float high = value[0];
    if (!rule.renormalize) {
        // Backwards, for a token that is banned and too early an end.
        if (early) high = std::max(high, row[rule.end] = hidden.back());
        for (int64_t i = rule.count - 1; i >= 0; i--)
            high = std::max(high, row[rule.banned[i]] = hidden[i]);
    }
    const float sum = log_sum(row, width, high);
    // A NaN is larger than nothing, so that `largest` may pass it over; it is in the sum. Where
    // nothing is possible, -∞ minus -∞ must not become NaN.
    for (int64_t i = 0; i < count; i++)
        if (value[i] != -INFINITY || sum != sum) value[i] -= sum;
}

// A candidate of a sentence's next step, or a hypothesis that has finished.
struct Candidate {
    float value, gain;
    int64_t parent, token;
};
struct Finished {
    float score, end;
    int64_t length, slot;
    bool cut;
};

// `Beams.extend` for sentence n, from the k best tokens of each of its rows.
void extend(const Search& s, int64_t n, int64_t k, const float* gain, const int64_t* token) {
    const Beams& beams = *s.beams;
    const int64_t W = beams.W, K = beams.K, w = s.each, b = s.place ? s.place[n] : n, t = s.t[b];
    static thread_local std::vector<Candidate> all, going;
    static thread_local std::vector<Finished> finished;
    static thread_local std::vector<int64_t> taken;
    all.clear(), going.clear(), finished.clear(), taken.assign(w, 0);
    if (std::any_of(gain, gain + w * k, [](float x) { return x != x; })) {
        std::fill_n(beams.scores + b * K, K, NAN);  // a Hypothesis of it raises
        s.over[b] = true;
        return;
    }
    // The best 2W of all, from rows that are sorted; of equals, the first.
    const auto head = [&](int64_t row) {
        const int64_t i = row * k + taken[row];
        return Candidate{gain[i] + beams.open[b * W + row], gain[i], row, token[i]};
    };
    while (int64_t(all.size()) < std::min(2 * W, w * k)) {
        int64_t from = -1;
        for (int64_t row = 0; row < w; row++)
            if (taken[row] < k && (from < 0 || head(row).value > head(from).value)) from = row;
        all.push_back(head(from));
        taken[from]++;
    }
    // The last one again and again, impossible, where there are too few.
    all.resize(2 * W, {-INFINITY, gain[w * k - 1], w - 1, token[w * k - 1]});

    // Those finished before, and those that end or are cut now.
    const float divisor = beams.penalty[t + 1];
    const bool full = t + 1 >= s.rule.most[b];
    for (int64_t i = b * K; i < (b + 1) * K; i++)
        finished.push_back({beams.scores[i], beams.ends[i], beams.lengths[i], beams.slots[i],
                            beams.cut[i]});
    for (int64_t i = 0; i < 2 * W; i++) {
        const Candidate& one = all[i];
        const bool ended = one.token == s.rule.end;
        if (i < W && (ended || full))
            finished.push_back({one.value / divisor, one.gain, ended ? t : t + 1,
                                ended ? one.parent : int64_t(going.size()), !ended});
        if (!ended) going.push_back(one);
    }
    for (const Candidate& one : all)  // of whom there are too few only where nothing is possible
        if (one.token == s.rule.end) {
            going.push_back(one);
            going.back().value = -INFINITY;
        }
    std::stable_sort(finished.begin(), finished.end(),
                     [](const Finished& x, const Finished& y) { return x.score > y.score; });
    for (int64_t i = 0; i < K; i++) {
        const int64_t to = b * K + i;
        beams.scores[to] = finished[i].score;
        beams.ends[to] = finished[i].end;
        beams.lengths[to] = finished[i].length;
        beams.slots[to] = finished[i].slot;
        beams.cut[to] = finished[i].cut;
    }

    const int64_t past = (b * beams.columns + t) * W;
    float high = -INFINITY;
    for (int64_t i = 0; i < W; i++) {
        const Candidate& one = going[i];
        beams.open[b * W + i] = one.value;
        beams.parents[past + i] = one.parent;
        beams.gains[past + i] = one.gain;
        s.last[n * W + i] = beams.tokens[past + i] = one.token;
        s.rows[n * W + i] = n * w + one.parent;
        high = std::max(high, one.value);
    }
    // The largest lp that is hoped for; none where no more tokens are allowed.
    float lp = 0.0f;
    const int64_t end = std::min(s.rule.most[b], t + 2 + beams.horizon);
    for (int64_t m = t + 2; m <= end; m++) lp = std::max(lp, beams.penalty[m]);
    const float future = high / lp;
    const float worst = beams.scores[b * K + K - 1];
    s.over[b] = full || worst >= future || (W == 1 && worst > -INFINITY);
}

// `Paths.extend` for sentence n, from its best token.
void follow(const Search& s, int64_t n, float log, int64_t token) {
    const Paths& paths = *s.paths;
    const int64_t b = s.place ? s.place[n] : n, t = s.t[b];
    const int64_t at = (paths.sentence ? paths.sentence[b] : b) * paths.columns + t;
    paths.tokens[at] = s.last[n] = token;
    paths.scores[at] = double(log);
    s.over[b] = token == s.rule.end || t + 1 >= s.rule.most[b] || log != log;
}

}  // namespace
