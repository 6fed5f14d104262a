// Tiles of 16-bit numbers as they are, for tensor cores: products of two of them are exact in
// float32, so that nothing has to be split as in halves.cuh.
//
// Eight neighbouring numbers, 16 bytes, are a group, and a group of each of eight rows is a matrix
// as ldmatrix reads it. What is multiplied by a band (bands.rest.cu) is read in pairs of neighbours
// that may begin anywhere: there are two copies of it, the second one number further on.
#pragma once
#include "tile.cuh"

constexpr int kEight = 8;

/// Bytes from row to row: an odd number of groups, so that those of eight rows lie in all banks.
template <int kGroups>
constexpr int kEightPitch = (kGroups | 1) * 16;

/// Tells whether all numbers that were added are finite: 0 times one that is not is no number.
template <bool kBrain>
struct Finite {
    unsigned sums = 0;

    __device__ void add(unsigned two) {
#if __CUDA_ARCH__ >= 800
        if constexpr (kBrain)
            asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sums) : "r"(two), "r"(0));
        else
            asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sums) : "r"(two), "r"(0));
#endif
    }
    __device__ void add(const uint4& all) { add(all.x), add(all.y), add(all.z), add(all.w); }
    __device__ bool all() const { return (sums & 0x7fff7fff) == 0; }
};

/// Eight elements of a line one by one, from column x on.
__device__ inline uint4 eight_singly(const Short* line, const Image& from, int64_t x) {
    unsigned bits[kEight] = {};
    if (from.boundary == Boundary::kZero) {
#pragma unroll
        for (int k = 0; k < kEight; ++k)
            if (x + k >= 0 && x + k < from.W) bits[k] = line[(x + k) * from.along].bits;
    } else {
#pragma unroll 1
        for (int k = 0; k < kEight; ++k) {
            const unsigned one = line[extended(x + k, from.W, from.boundary) * from.along].bits;
#pragma unroll
            for (int i = 0; i < kEight; ++i)
                if (i == k) bits[i] = one;
        }
    }
    return {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
            bits[6] | bits[7] << 16};
}

/// Eight elements from `at` on by words of 4 bytes, on which, or between two of which, they begin.
struct EightWords {
    unsigned word[5] = {}, shift = 0;

    __device__ void fetch(const Short* at) {
        const auto address = reinterpret_cast<uintptr_t>(at);
        const auto* from = reinterpret_cast<const unsigned*>(address & ~uintptr_t(3));
        shift = unsigned(address & 2) * 8;
#pragma unroll
        for (int k = 0; k < 5; ++k)
            if (k < 4 || shift) word[k] = from[k];
    }
    __device__ uint4 all() const {
        const auto part = [&](int k) { return __funnelshift_r(word[k], word[k + 1], shift); };
        return {part(0), part(1), part(2), part(3)};
    }
};

/// Takes `rows` rows of kGroups groups from (y, x) of an image on to `store(row, group, group's
/// bytes)`, extended beyond the borders. Rows may begin on any element. Returns whether this
/// thread's are all finite.
template <int kGroups, bool kBrain, typename Store>
__device__ inline bool fetch_eights(const Store& store, const Image& from, int64_t y, int64_t x,
                                    int rows) {
    constexpr int kEach = 5;  // groups of a thread under way
    const int64_t down = from.down;
    const Short* const top = static_cast<const Short*>(from.data) + from.begin + y * down + x;
    const bool within = from.along == 1 && y >= 0 && y + rows <= from.H;
    const bool whole =
        within && x >= 0 && x + kEight * kGroups <= from.W &&
        (reinterpret_cast<uintptr_t>(top) | uintptr_t(down) * sizeof(Short)) % 16 == 0;
    const bool words = within && x > 0 && x + kEight * kGroups < from.W;
    const int all = rows * kGroups;
    Finite<kBrain> finite;
#pragma unroll 1
    for (int first = threadIdx.x; first < all; first += kEach * kThreads) {
        uint4 groups[kEach] = {};
        const auto each = [&](const auto& body) {
#pragma unroll
            for (int e = 0; e < kEach; ++e) {
                const int i = first + e * kThreads, row = i / kGroups, group = i % kGroups;
                if (i < all) body(e, row, group);
            }
        };
        if (whole) {
            each([&](int e, int row, int group) {
                groups[e] = *reinterpret_cast<const uint4*>(top + row * down + group * kEight);
            });
        } else {
            EightWords word[kEach];
            bool single[kEach] = {};
            if (words) {
                each([&](int e, int row, int group) {
                    word[e].fetch(top + row * down + group * kEight);
                });
            } else {
                each([&](int e, int row, int group) {
                    const int64_t line = extended(y + row, from.H, from.boundary);
                    const int64_t column = x + group * kEight;
                    single[e] =
                        line >= 0 && (from.along != 1 || column <= 0 || column + kEight >= from.W);
                    if (line >= 0 && !single[e])
                        word[e].fetch(top + (line - y) * down + group * kEight);
                });
            }
            each([&](int e, int row, int group) {
                groups[e] = word[e].all();
                if (single[e])
                    groups[e] = eight_singly(
                        top + (extended(y + row, from.H, from.boundary) - y) * down - x, from,
                        x + group * kEight);
            });
        }
        each([&](int e, int row, int group) {
            finite.add(groups[e]);
            store(row, group, groups[e]);
        });
    }
    return finite.all();
}

/// A tile of rows of groups.
template <int kPitch>
struct EightRows {
    char* tile;
    __device__ void operator()(int row, int group, const uint4& all) const {
        *reinterpret_cast<uint4*>(tile + row * kPitch + group * 16) = all;
    }
};

/// Rows of `kNumbers` numbers from which pairs are read: eight zeros, the numbers, eight zeros, and
/// again from the second on.
template <int kNumbers>
struct PairRows {
    static constexpr int kRow = kNumbers + 16, kPitch = 2 * kRow;  // in numbers
    uint16_t* rows;

    __device__ void clear(int count) const {
        for (int k = threadIdx.x; k < count * (kPitch / kEight); k += kThreads)
            reinterpret_cast<uint4*>(rows)[k] = {};
    }
    __device__ void put(int row, int number, uint16_t bits) const {
        uint16_t* at = rows + row * kPitch + number;
        at[8] = at[kRow + 7] = bits;
    }
    /// A group of a row.
    __device__ void operator()(int row, int group, const uint4& all) const {
        uint16_t* at = rows + row * kPitch + group * kEight;
        *reinterpret_cast<uint4*>(at + 8) = all;
        at[kRow + 7] = uint16_t(all.x);
        const auto second = [](unsigned low, unsigned high) { return low >> 16 | high << 16; };
        *reinterpret_cast<uint2*>(at + kRow + 8) = {second(all.x, all.y), second(all.y, all.z)};
        *reinterpret_cast<unsigned*>(at + kRow + 12) = second(all.z, all.w);
        at[kRow + 14] = uint16_t(all.w >> 16);
    }
    /// This lane's column n = lane / 4 of a band: rows 2 (lane % 4) and the next hold a row's
    /// numbers 2 (lane % 4) - n and the next; word 4 d of these are those of 8 d rows further on.
    __device__ const unsigned* band() const {
        const int lane = threadIdx.x % 32, z = 2 * (lane % 4) + 8 - lane / 4;
        return reinterpret_cast<const unsigned*>(rows) + z / 2 + (z % 2 ? kRow / 2 : 0);
    }
};

/// Two 16 x 8 pieces, next to each other. `at`: row lane % 16 of the piece of lane / 16.
__device__ inline void fetch_pieces(unsigned (&left)[2], unsigned (&right)[2], unsigned at) {
#if __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(left[0]), "=r"(left[1]), "=r"(right[0]), "=r"(right[1])
                 : "r"(at));
#endif
}

/// sum += (16 x 16 numbers, as two pieces) x (16 x 8 numbers).
template <bool kBrain>
__device__ inline void multiply_eights(float (&sum)[4], const unsigned (&left)[2],
                                       const unsigned (&right)[2], unsigned upper, unsigned lower) {
#if __CUDA_ARCH__ >= 800
    if constexpr (kBrain)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
            "%7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(left[0]), "r"(left[1]), "r"(right[0]), "r"(right[1]), "r"(upper), "r"(lower));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
            "%7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(left[0]), "r"(left[1]), "r"(right[0]), "r"(right[1]), "r"(upper), "r"(lower));
#endif
}
/// The same of one piece.
template <bool kBrain>
__device__ inline void multiply_eights(float (&sum)[4], const unsigned (&left)[2], unsigned upper) {
#if __CUDA_ARCH__ >= 800
    if constexpr (kBrain)
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(left[0]), "r"(left[1]), "r"(upper));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(left[0]), "r"(left[1]), "r"(upper));
#endif
}

/// Two sums, rounded, as a word.
template <bool kBrain>
__device__ inline unsigned two_eights(float low, float high) {
    unsigned both = 0;
#if __CUDA_ARCH__ >= 800
    if constexpr (kBrain)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}
