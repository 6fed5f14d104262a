// The CUDA kernels of trilinear_interpolation and bilinear_interpolation; formula in multilinear.h.
//
// Bytes per point (D = 3, float32): forward reads 8F + 3 floats and writes F, 36F + 12 bytes; the
// gradient to feats moves the same in the other direction; the gradient to points reads 9F + 3.
// Flops: about 2 per feature read, under half a flop a byte: memory traffic decides. N = 65536,
// F = 256 moves 605 MB, 141 us at 4.28 TB/s.
//
// Three mappings. Narrow cells (multilinear_narrow.cuh), and wider ones whose rows are no whole
// number of 16-byte words (multilinear_tiles.cuh, multilinear_sums.cuh), move through shared memory
// in whole runs of such words; rows of whole words need no such way (multilinear_wide.cuh). No
// atomics: every sum has a fixed order, so each run gives the same bits.
#pragma once
#include "choices.h"
#include "multilinear_narrow.cuh"
#include "multilinear_sums.cuh"
#include "multilinear_tiles.cuh"
#include "multilinear_wide.cuh"

template <typename Cell, typename T>
inline const char* launch_elements(const MultilinearParams& p, cudaStream_t stream) {
    constexpr int D = Cell::D, K = 1 << D, V = 16 / sizeof(T);
    const bool sums = p.grad_points, flat = !p.out && !sums;
    // Without features there is nothing but a gradient to points, of zeros.
    if (p.F == 0) return flat ? nullptr : wide::launch<Cell, T, 1>(p, stream);
    const auto told = [&](const char* way, const char* why) {
        const char* const what = p.out  ? "kernel"
                                 : flat ? "kernel, gradient to feats"
                                        : "kernel, gradients";
        tell_choice(D == 3 ? "trilinear_interpolation" : "bilinear_interpolation", what, way, why);
    };
    if (narrow::fits<T>(p, K)) {
        told("a thread to a point", "up to 8 features, neighbours in memory");
        return narrow::launch<Cell, T>(p, stream);
    }
    const bool few = sums && tiles::are_few<T>(p, K);
    if (wide::fits<T>(p, V) && !few && (!flat || wide::is_flat<T>(p))) {
        told("words of 16 bytes", "rows are whole numbers of them");
        return flat ? wide::launch_flat<Cell, T>(p, stream) : wide::launch<Cell, T, V>(p, stream);
    }
    if (p.out && p.F >= tiles::kLongRow && wide::are_cells<T>(p, K)) {
        told("words of a feature's corners", "these lie side by side");
        return wide::launch_cells<Cell, T>(p, stream);
    }
    const char* const tiled = "the rows of a run of points are moved together, as whole words";
    if (sums) {
        const tiles::Plan plan = tiles::sums_plan_of<T, K>(p);
        if (tiles::suits_sums<T>(p, plan, K)) {
            told("tiles in shared memory", tiled);
            return tiles::launch_sums<Cell, T>(p, plan, stream);
        }
    } else {
        const tiles::Tiling tiling = tiles::plan_of<T, K>(p);
        if (flat || tiles::suits<T>(p, tiling.plan, K)) {
            told("tiles in shared memory", tiled);
            return tiles::launch<Cell, T>(p, tiling, stream);
        }
    }
    told("an element at a time", "rows are no whole words, and too few or too far apart for tiles");
    return wide::launch<Cell, T, 1>(p, stream);
}

/// Forward where `out` is set, else backward. A file each compiles the kernels for float32, for
/// float64 and for 16 bits: what few calls need is not waited for.
template <typename Cell>
inline const char* multilinear_cuda(const MultilinearParams& p, void* stream) {
    return launch_elements<Cell, float>(p, static_cast<cudaStream_t>(stream));
}
template <typename Cell>
inline const char* multilinear_double_cuda(const MultilinearParams& p, void* stream) {
    return launch_elements<Cell, double>(p, static_cast<cudaStream_t>(stream));
}
template <typename Cell>
inline const char* multilinear_16bit_cuda(const MultilinearParams& p, void* stream) {
    const auto queue = static_cast<cudaStream_t>(stream);
    // As Short, one type for both, backward takes 3 to 7 % longer.
    return p.dtype == DType::kHalf ? launch_elements<Cell, Half>(p, queue)
                                   : launch_elements<Cell, BFloat16>(p, queue);
}
