// Bicubic interpolation on the CPU, of images and volumes, with first and second derivatives.
//
// A point has four pixels along x in each of 4 rows, or of 16 in a volume. Every job sums pixels by
// weights that are products of one for each axis, or of its derivatives: values by wz wy wx,
// gradients to the grid by wz' wy wx, wz wy' wx, wz wy wx', their derivatives by wz'' wy wx and so
// on. So the sums along y and then z are shared by all of these. A channel at a time, rows are
// vectors of four pixels and x comes last; or, where channels are neighbours in memory, vectors are
// of channels and x comes first. Pixels of points at a border are gathered first, zeros for those
// outside.
#include "cubic_points.h"
#include "cubic_scatter.h"

namespace {

template <typename A>
void run(const GridSampleParams& p, const Fields& fields, const Part& part) {
    CubicBlock<A> block(p);
    CubicPoints<A> points(block, fields);
    CubicScatter<A> scatter(block, fields.target);
    // The second derivative reaches the input by what arrives for the grid alone.
    const bool scatters = part.scatter && (!p.to_grad_input || p.to_grad_grid);
    for (int64_t first = part.begin; first < part.end; first += kBlock) {
        block.begin(part.image, first);
        block.count = int(std::min<int64_t>(block.count, part.end - first));
        block.find(block.outermost);
        if (!part.points && !(scatters && block.keep(4, part.rows[0], part.rows[1]))) continue;
        block.find_others();
        if (part.points) points.run();
        if (scatters) scatter.run(part);
    }
}

}  // namespace

void grid_sample_cubic_cpu(const GridSampleParams* p, const Fields* fields, const Part* part) {
    (p->dtype == DType::kDouble ? run<double> : run<float>)(*p, *fields, *part);
}
