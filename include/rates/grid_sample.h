// What work of grid_sample takes on a GPU: every number by which a call's way is chosen among
// several (choices.h tells which, and why). Microseconds, unless it says otherwise.
#pragma once
#include <cstdint>

/// Of any job. An H200's, from sweeps with each way forced in turn (cases at random, medians, cold
/// L2 cache). A choice goes by ratios, which other GPUs are taken to share, until one has rates of
/// its own.
struct GridSampleRates {
    double small = 0.1;        // MB that an L1 cache holds of a field,
    double large = 50;         // and the L2 cache
    int64_t held = 256 << 10;  // bytes of an image that threads to a point read quicker
    int64_t odd = 200 << 10;   // and of one whose pixels have an odd number of words
    // Pixels to a point, from where points have no neighbours: nearest ones of images, and others;
    // and bytes of a field of which channels are then read one by one, or added to.
    double lonely_nearest = 3.5, lonely = 5, plane_field = 2e7, plane_sums = 5e7;
    // A million elements to turn, more where planes have gaps between their rows, as a slice has:
    // of up to four channels, and of more.
    double gaps_few = 4.5, gaps = 1;
    double large_blocks = 1.5;  // points to a pixel, up to which planes have these (an H100's)
    int64_t few = 1 << 15;      // points, below which a warp to 32 of them leaves a GPU idle
    // Of planes that are added to: points, below which 16 threads share one, or 32.
    int64_t fewer = 6000, fewest = 512;
    int64_t filled = 132 << 10;  // threads that fill it
    double kept = 2 << 20;  // bytes of an image whose pixels caches keep for their next channel
    // Bytes of a pixel that several threads read, as an L1 cache has lost it by the next channel;
    // eight of float64 from so many channels and, since four have a sector, so many points on.
    int64_t shared_pixel = 64, wide_channels = 16, wide_points = 1024;
    // To the grid: at most so many threads share points, and of up to four planes a third of them.
    int64_t sharing = 3 << 16;
    // Words of channels that lie in two of memory's are read from so many points and bytes of an
    // image on, and up to so many points a pixel; to so many where a copy is quick (an H100's).
    int64_t across_points = 1 << 14, across_image = 4 << 20;
    double across_most = 3, across_quick = 0.75;
};
constexpr GridSampleRates kGridSampleRates;

/// Of reading a field as it is, or turned: channels last, padded to words. An H100's, fitted to how
/// long both ways took in 3,000 cases at random that have both: images of a few pixels to 600 MB.
struct GridSampleReadRates {
    // A million rows of a cell's pixels each take: of a channel, or of a word; more as far as 32
    // neighbours' lie apart, in lines of a cache where they are planes; and a million sectors that
    // an L1 cache misses, or the L2 cache.
    struct Rows {
        double row, spread, missed, lost;
    };
    Rows planes, last;    // as it is, and where channels lie side by side,
    Rows shared, single;  // and turned: where threads share a point's words, or each has a point
    // What turning takes: its launches, a MB that it reads or writes, and what a turned field's
    // kernels take more of a million points, and of a million outputs.
    double turn, stream, point, out;
    double worth;  // what has to be saved by a look, which takes some 20
    double bet;    // without one: how many times as much turning has to save as it may lose
};
// clang-format off
constexpr GridSampleReadRates kGridSampleForwardRates{
    {0.73, 1, 3.6, 14}, {0.51, 1.7, 1.4, 3.4},
    {1.3, 0, 1, 12}, {0.65, 0.26, 3.5, 4.7},
    4.1, 0.31, 1.8, 0.28,
    60, 1.5,
};
/// Of the gradient to the grid, whose slopes need the same pixels.
constexpr GridSampleReadRates kGridSampleSlopeRates{
    {0.94, 0.64, 3.4, 20}, {1.03, 1.3, 1.1, 6.7},
    {1.6, 0.12, 0.75, 15}, {},
    3.8, 0.34, 3, 0.44,
    60, 1.2,
};
// clang-format on

/// Of bicubic interpolation as it is, or turned: fitted to both ways of 130 cases at random, an
/// H200's, and of images in order to those of 28 others, an H100's. A million rows of four taps
/// each take:
struct GridSampleCubicRates {
    // Images forward: a channel of points in order, and scattered; the same side by side; and a
    // word of four channels.
    double near = 1.6, far = 7.9, last_near = 1.6, last_far = 8.1, word_near = 8.3, word_far = 14;
    // Volumes, a channel and a word: forward, and of the gradient to the grid.
    double volume = 4.2, volume_word = 8, volume_slopes = 11, word_slopes = 12;
    // What both gradients read: a channel, a word. A million additions: of a channel of an image,
    // along rows of pixels; of others; of a word.
    double read = 3, read_word = 10, add_row = 5.5, add = 8.5, add_word = 11.5;
    // Passes as in GridSampleReadRates, and what more launches take.
    double turn = 2.6, stream = 2.2, out = 1.06, launches = 5;
    // What a look takes, and a million threads of the kernel for fields as they are that it leaves
    // idle; how many times as much as a look it has to save.
    double look = 12, idle = 4.7, worth = 1.5;
    // Images of two or three channels side by side, rows of four pixels added to as one line: from
    // so many points on (0.85 of the time, the mean of 720 drawn cases, an H200's); of three
    // channels, up to so many points to a pixel, beyond which padded words of four pay.
    int64_t pixel_points = 1 << 14;
    double pixel_crowd = 16;
};
constexpr GridSampleCubicRates kGridSampleCubicRates;

/// Of scattered points in a field that the L2 cache does not hold, taken by slabs of the field: an
/// H100's.
struct GridSampleSlabRates {
    double slab = 34, slab_sums = 40;  // MB of a slab; of one that is added to
    double least = 40;                 // MB of a field that is cut
    int most = 64;                     // slabs
    double held = 28;                  // MB of the field that the cache holds in fact
    double traffic = 8e7;              // bytes that are read until nothing of it is left
    double window = 8192;              // points that a look at them takes at least
    int64_t few = 1 << 18;             // points of an image, below which there is little to save
    // What a million rows of a cell's pixels take more where the cache misses them: forward, to
    // the grid, to the input, or each word of four channels that is added.
    double forward = 20, slopes = 16, sums = 53, words = 26;
    // What another slab takes of a million points, of a byte of their coordinates, of results and
    // of gradients, whose sectors it has in common with others.
    double pass = 0.5, pass_words = 4, place = 0.2, written = 0.55, read = 0.35;
    // What a look takes, and a launch that does nothing; and how many times that slabs must save.
    // Where points are not scattered, as those of images seldom are, it is lost: 2 to 10 % of the
    // time.
    double look = 10, launch = 2, worth_image = 50, worth_volume = 20;
    int images = 8;  // whose launches are long where they do nothing
};
constexpr GridSampleSlabRates kGridSampleSlabRates;

/// Of the gradient to the input, by an H200; of runs of pixels and touched pixels, by an H100.
struct GridSampleGradientRates {
    // A million additions to sums in memory, fitted to 1,200 cases at random: of points in order,
    // as many to a pixel or more, whose neighbours add up first; more of these from four pixels to
    // a point on; of scattered ones; and more where the L2 cache holds no sums.
    struct Adds {
        double near, apart, far, missed, held;  // held: MB that the cache has
    };
    Adds add_row{3.8, 4.9, 6.9, 14, 40};             // of planes,
    Adds add_beside{5.6, 2.3, 10, 8, 40};            // of channels side by side, and of these
    Adds add_pixel{2.8, 2.7, 4.6, 8, 40};            // where a kernel adds up to three at a time;
    Adds add_nearest{5.3, 13, 11.8, 22, 33};         // of nearest points;
    Adds add_word{3.2, 4.3, 6.2, 13, 40};            // of words of four channels,
    Adds add_nearest_word{10.5, 2.3, 12.7, 10, 33};  // and of nearest points
    double add_word_point = 15;        // and of a million points, whose words a warp shares out
    double stream = 2.6;               // MB of a pass that turns channels last,
    double zeroed = 4.3, rounded = 4;  // of passes that turn nothing: each
    double coherent = 2.2, scattered = 6.5;  // a million rows of a channel's pixels, as they are,
    double words = 7, row = 12, row_byte = 0.27;  // and turned: of four channels; more, by bytes
    // Of both gradients, an H100's, fitted to cases at random. A million rows: of the first word of
    // four channels of a copy, where the kernel that sums reads it; of each further one; and of a
    // channel as it is, or beside others, where the kernel for the gradient to the grid alone does.
    double fused = 9.9, fused_word = 7.2, alone = 4.05, alone_last = 5.3;
    double look = 2;                 // sectors that 32 points lie in, in order
    double launches = 5;             // what passes take in any case
    int64_t short_zeros = 16 << 20;  // bytes, up to which a kernel writes them that others follow
    int64_t few = 1 << 14;           // points, below which a warp to 32 of them leaves a GPU idle;
    int64_t few_words = 1 << 16;     // to the grid alone,
    int64_t few_sums = 1 << 17;  // and elements of theirs, below which launches decide, not work
    // Pixels to a point, beyond which passes in float do not pay, and those that turn.
    double rare = 128, rare_nearest = 32, sparse = 4;
    // So many points to a pixel, and lanes no longer share the channels of one: each then adds up
    // what its own points give the same pixel. Where channels neighbour, later.
    double crowded = 0.5, crowded_last = 1.25;
    double most = 31;        // sectors that 32 points lie in: scattered ones are in hardly more
    double worth = 25;       // what has to be saved by a look, which costs half of it,
    double idle = 4.7;       // and by a million threads that it leaves idle
    int64_t field = 110000;  // bytes of sums in shared memory, of two blocks to an SM,
    int64_t field_channels = 16;  // of so many channels at most
    // So many additions to each pixel, from where that may pay; of linear ones, from where it does,
    // whatever the points are: fewer in fields of hardly any pixels.
    double field_adds = 256, field_sure = 8192;
    int64_t field_pixels = 64;
    float field_few = 4;     // pixels that 32 points lie in, from where else it pays: not float64
    double apart = 2;        // pixels to a point, below which points crowd: padded sums pay there
    double passes = 4.7e-6;  // of an element in 16 bits, in float, beyond writing it;
    double listed = 3.5e-5;  // of a point in the lists of runs of pixels,
    double summed = 8.9e-6;  // of each of its gradients,
    double summed_word = 3.1e-5;   // more where words of four channels could be added otherwise,
    double lists = 20;             // of launching what makes these,
    double lists_last = 30;        // and more where channels lie side by side
    int64_t touched_channels = 4;  // from how many on sums of touched pixels may pay,
    double touches = 8;            // of launching what sets touched sums to zero and rounds them,
    double touch = 60;             // of a million sectors of these
};
constexpr GridSampleGradientRates kGridSampleGradientRates;

/// Of sums of few pixels, an H200's. In memory, fitted to 204 cases at random of scattered points:
/// what they take in any case, a million additions, and a thousand requests of one sector, which
/// wait for each other. In shared memory, by 514: also a million points, and sums that go to
/// memory.
struct GridSampleFieldRates {
    struct Memory {
        double least, add, wait;
    };
    Memory planes, last;
    double least, point, add, flush;
};
// clang-format off
constexpr GridSampleFieldRates kGridSampleLinearField{
    {16, 0.9, 8}, {8.4, 4.4, 4},
    11, 6.6, 2.5, 5.4,
};
constexpr GridSampleFieldRates kGridSampleNearestField{
    {9, 5.2, 15}, {6.8, 8.2, 6.2},
    10, 9.5, 7.7, 3.4,
};
// clang-format on

/// Of sums of float64 of few pixels, an H100's, fitted to 120 cases at random. A million additions:
struct GridSampleDoubleRates {
    // In memory: of points in order; more of scattered ones; and more where one sector has them
    // all, which waits for each.
    double near = 3.5, far = 11, waiting = 4000;
    double sum = 5, flush = 13;  // in shared memory; of a block's sums to memory
    double launch = 15;          // what these take in any case,
    double worth = 60;           // and what they have to save for a look, which takes some 15
};
constexpr GridSampleDoubleRates kGridSampleDoubleRates;
