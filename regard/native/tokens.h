// Tokens of packed sequences, and the heads of each: (tokens, heads, width), the width without gaps,
// and the strides of the others in floats.

#pragma once

#include <cstdint>

extern "C" {
struct Tokens {
    float* data;
    int64_t token, head;
};
}
