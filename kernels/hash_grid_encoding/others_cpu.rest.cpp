// Multiresolution hash encoding on the CPU of float64 and 16-bit tables; levels_cpu.h has the
// loops.
#include "levels_cpu.h"

namespace {

/// Calls `body` with the number of axes as a value, and an element of the table's.
template <typename Body>
void by_kind(const HashGridParams& p, const Body& body) {
    dispatch(p.dtype, [&](auto element) {
        if constexpr (!std::is_same_v<decltype(element), float>)
            by_axes(p, [&](auto D) { body(D, element); });
    });
}

}  // namespace

void hash_grid_others_cpu(const HashGridParams* p, int64_t begin, int64_t end) {
    by_kind(*p, [&](auto D, auto element) { encode<D(), decltype(element)>(*p, begin, end); });
}

void hash_grid_points_others_cpu(const HashGridParams* p, int64_t begin, int64_t end) {
    by_kind(*p,
            [&](auto D, auto element) { points_gradient<D(), decltype(element)>(*p, begin, end); });
}

void hash_grid_table_others_cpu(const HashGridParams* p, int64_t begin, int64_t end) {
    by_kind(*p, [&](auto D, auto element) {
        for (int64_t task = begin; task < end; ++task)
            table_gradient<D(), decltype(element)>(*p, task);
    });
}
