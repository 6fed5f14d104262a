// Multiresolution hash encoding on the CPU of float32 tables; levels_cpu.h has the loops.
#include "levels_cpu.h"

void hash_grid_cpu(const HashGridParams* p, int64_t begin, int64_t end) {
    by_axes(*p, [&](auto D) { encode<D(), float>(*p, begin, end); });
}

void hash_grid_points_cpu(const HashGridParams* p, int64_t begin, int64_t end) {
    by_axes(*p, [&](auto D) { points_gradient<D(), float>(*p, begin, end); });
}

void hash_grid_table_cpu(const HashGridParams* p, int64_t begin, int64_t end) {
    by_axes(*p, [&](auto D) {
        for (int64_t task = begin; task < end; ++task) table_gradient<D(), float>(*p, task);
    });
}
