// Images in two dimensions, where 4-D grid_sample spends its time: float32, without copies, one
// derivative (float64: double_cpu.rest.cpp). A channel at a time in vectors of points; or, where
// channels are neighbours in memory, a point at a time in vectors of channels.
//
// An axis' two taps are a pair of neighbouring pixels that always lies within the image: at its
// borders the pair is moved inwards and the weights change places, and what is outside gets none.
// So one offset a point serves all four taps, a pair is one load, and nothing depends on where the
// points are but a mask, which keeps infinite pixels that a point does not touch out of its sum.
#include "planes_cubic.h"
#include "planes_linear.h"

void grid_sample_planes_cpu(const GridSampleParams* p, const Part* part) {
    Planes<float>(*p, *part).run();
}
