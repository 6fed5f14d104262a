// Two-dimensional convolution on the CPU in float64 and 16 bits; rows_cpu.h has the loops.
#include "rows_cpu.h"

namespace {

/// Calls `body` with an element of the images'.
template <typename Body>
void by_element(const Convolve2dParams& p, const Body& body) {
    dispatch(p.dtype, [&](auto element) {
        if constexpr (!std::is_same_v<decltype(element), float>) body(element);
    });
}

}  // namespace

void convolve2d_others_cpu(const Convolve2dParams* p, int64_t begin, int64_t end) {
    by_element(*p, [&](auto element) { convolve_rows<decltype(element)>(*p, begin, end); });
}

void convolve2d_fold_others_cpu(const Convolve2dParams* p, int64_t begin, int64_t end) {
    by_element(*p, [&](auto element) { fold_pixels<decltype(element)>(*p, begin, end); });
}

void convolve2d_parts_others_cpu(const Convolve2dParams* p, int64_t begin, int64_t end) {
    by_element(*p, [&](auto element) { gradient_parts<decltype(element)>(*p, begin, end); });
}
