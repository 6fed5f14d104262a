// grid_sample and its derivatives on the CPU in float64: steps_cpu.cpp and planes_cpu.cpp say how.
#include "phases.h"
#include "planes_cubic.h"
#include "planes_linear.h"

void grid_sample_planes_double_cpu(const GridSampleParams* p, const Part* part) {
    Planes<double>(*p, *part).run();
}

void grid_sample_double_cpu(const GridSampleParams* p, int64_t begin, int64_t end) {
    run<double>(*p, begin, end);
}
