// Multiresolution hash encoding on the GPU; formula and levels in hash_grid_encoding.h.
//
// Gathers and scatters of fine levels go to places all over a level's table, so what counts is the
// number of 32-byte sectors that the L2 hands out, some 170e9 a second on an H200, as long as the
// tables in use stay in its 50 MB: of L = 16 levels of T = 2^19 rows of F = 2 float32 (64 MB) a
// group of 4 (16 MB) is worked on at a time (blockIdx.y, the slow part of the grid). Corners x and
// x + 1 have rows h ^ x and h ^ (x + 1), of one sector in 3 of 4 cases; two neighbouring threads
// take them, so that the same instruction reads both: 5 sectors for the 8 corners. 1M points take
// 16 * 5M = 84M sectors, 0.49 ms, less what the L1 answers for the coarse levels.
// Backward to the table: the same sectors, each read and written by vector reductions in the L2. Of
// coarse levels, whose rows many points share, these would wait for each other: they are summed in
// shared memory first (crowded.cuh).
// The order of these additions is open; where it must not matter they are made in fixed point
// (fixed_point.cuh). 16-bit gradients are summed in float32, a group of levels at a time so that
// the sums stay in the L2, and rounded once.
// Backward to the points gathers as the forward does; sums of each group, then over the groups.
// F = 1, 2, 4 and 8 have kernels of their own, here those of float32, any other F those in
// any.rest.cu.
#include "points.cuh"

const char* hash_grid_cuda(const HashGridParams* p, void* stream) {
    return encode<float>(*p, static_cast<cudaStream_t>(stream));
}

const char* hash_grid_points_cuda(const HashGridParams* p, void* stream) {
    return points_gradient<float>(*p, static_cast<cudaStream_t>(stream));
}
