// Two-dimensional convolution on the CPU in float32; rows_cpu.h has the loops.
#include "rows_cpu.h"

void convolve2d_cpu(const Convolve2dParams* p, int64_t begin, int64_t end) {
    convolve_rows<float>(*p, begin, end);
}

void convolve2d_fold_cpu(const Convolve2dParams* p, int64_t begin, int64_t end) {
    fold_pixels<float>(*p, begin, end);
}

void convolve2d_parts_cpu(const Convolve2dParams* p, int64_t begin, int64_t end) {
    gradient_parts<float>(*p, begin, end);
}

void convolve2d_sum_cpu(const Convolve2dParams* p, int64_t begin, int64_t end) {
    dispatch(p->dtype, [&](auto element) {
        using A = Acc<decltype(element)>;
        const int64_t taps = p->kh * p->kw;
        for (int64_t i = begin; i < end; ++i) {
            const A* part =
                static_cast<const A*>(p->partial) + i / taps * p->splits * taps + i % taps;
            double sum = 0;
            for (int64_t s = 0; s < p->splits; ++s) sum += part[s * taps];
            store_tap(*p, i, sum);
        }
    });
}
