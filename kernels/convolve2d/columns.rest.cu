// Convolutions with few taps, which traffic decides and not arithmetic: see columns.cuh.
#include "columns.cuh"

template <typename T, int kTaps>
static const char* with_taps(const Convolve2dParams& p, cudaStream_t stream) {
    if constexpr (kTaps > 1)
        if (p.kw < kTaps) return with_taps<T, kTaps - 1>(p, stream);
    if constexpr (sizeof(T) == 2 || kTaps <= kFloatTapsTall)
        if (p.kh > 4) return launch_columns<T, kColumnTaps, kTaps>(p, stream);
    return launch_columns<T, 4, kTaps>(p, stream);
}

const char* convolve2d_columns_cuda(const Convolve2dParams* p, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    return p->dtype == DType::kFloat ? with_taps<float, kFloatTaps>(*p, on)
                                     : with_taps<Short, kColumnTaps>(*p, on);
}
