// How grid_sample's CUDA kernels for many channels that lie side by side share words of channels
// among the threads of a warp: each has a point, and all take part in every point's channels.
#pragma once
#include "job.cuh"

constexpr int kMostLanes = 8;  // threads that share a point

/// 32 points of a warp's channels: in rows of points in memory, of channels in registers.
template <typename T, int V>
struct Stage {
    T at[V * kMostLanes + 1][33];

    /// Channel j of thread `lane` of a group. Groups and lanes then lie in different banks.
    __device__ T* row(int lane, int j, int lanes) { return at[j * lanes + lane]; }
};

/// Blocks to an SM of kernels that share words out: registers for what a thread has under way.
template <int V, int D>
constexpr int kWordBlocks = (D == 3 ? 6 : 8) - (V == 8);

constexpr int kMostWords = 8;  // of a point, that are staged at a time: half of them with slopes

/// The words of V channels of a warp's 32 points, `words` of each, and which of them a thread has
/// next: neighbouring threads have neighbouring words, then the next point's.
struct WordOf {
    int point, word;
    int words, points, rest;  // of a point; whole points and further words that 32 threads have

    __device__ explicit WordOf(int words)
        : point(int(threadIdx.x) % 32 / words),
          word(int(threadIdx.x) % 32 - point * words),
          words(words),
          points(32 / words),
          rest(32 - points * words) {}
    __device__ void advance() {
        point += points, word += rest;
        if (word >= words) word -= words, ++point;
    }
};

/// Those channels in shared memory: a row of 32 points for each.
template <typename T, int V>
struct WordStage {
    T* at;
    int words, pitch;

    /// Elements of a row: threads that have neighbouring words are in different banks.
    HD static constexpr int pitch_of(int words) {
        return sizeof(T) == 2 ? 40 : 32 + (31 + words) / words;
    }
    HD static constexpr int elements(int words) { return V * words * pitch_of(words); }

    __device__ WordStage(void* memory, int words)
        : at(static_cast<T*>(memory) + threadIdx.x / 32 * elements(words)),
          words(words),
          pitch(pitch_of(words)) {}
    /// Channel j of a word.
    __device__ T* row(int word, int j) const { return at + (j * words + word) * pitch; }
};
