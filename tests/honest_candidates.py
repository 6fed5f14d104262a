"""Candidates that are what they seem, in many ways of writing them: none may be refused."""

from hostile_candidates import REFERENCE, RIGHT, module

_INPUTS = "\n\ndef get_inputs():\n    return [{}]\n\n\ndef get_init_inputs():\n    return [{}]\n"


def model(body: str, inputs: str, init: str = "", made: str = "", name: str = "Model") -> str:
    """A file with a model: forward(self, *a) is this."""
    maker = (
        f"    def __init__(self, *n):\n        super().__init__()\n        {made}\n" if made else ""
    )
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    kind = f"class {name}(torch.nn.Module):\n{maker}    def forward(self, *a):\n{lines}\n"
    head = "import torch\nimport torch.nn.functional as F\n\n\n"
    return head + kind + (_INPUTS.format(inputs, init) if inputs else "")


REFERENCES = {
    "usual": REFERENCE,
    "linear": model(
        "return torch.relu(self.l(a[0]))",
        "torch.randn(16, 48)",
        "48",
        "self.l = torch.nn.Linear(n[0], 32)",
    ),
    "softmax": model("return torch.softmax(a[0], -1)", "torch.randn(8, 500)"),
    "layer_norm": model("return F.layer_norm(a[0], a[0].shape[-1:])", "torch.randn(8, 300)"),
    "long_sum": model("return a[0].sum(-1)", "torch.rand(2, 60000)"),
    "convolution": model(
        "return self.c(a[0])",
        "torch.rand(2, 4, 12, 12)",
        "4, 6",
        "self.c = torch.nn.Conv2d(n[0], n[1], 3)",
    ),
    "matmul": model("return a[0] @ a[1]", "torch.rand(40, 256), torch.rand(256, 24)"),
    "triangle": model("return a[0] @ a[1]", "torch.rand(30, 30).tril(), torch.rand(30, 30).tril()"),
    "gather": model("return a[0][a[1]]", "torch.rand(50, 6), torch.randint(0, 50, (33,))"),
    "top": model("return torch.topk(a[0], 3)", "torch.rand(12, 30)"),
    "half": model(
        "return (a[0] * a[1]).sum(-1)",
        "torch.rand(8, 200).bfloat16(), torch.rand(8, 200).bfloat16()",
    ),
    "changes": model("a[0].mul_(2)\nreturn a[0].sum()", "torch.rand(20, 20)"),
    "view": model("return a[0].view(-1)", "torch.rand(6, 7)"),
    "named": model(
        "return {'twice': 2 * a[0], 'size': a[0].shape[0], 'no': None}", "torch.rand(9, 9)"
    ),
    "scalar": model("return a[0] * a[1]", "torch.rand(9, 9), 2.5"),
    "doubles": model("return torch.exp(a[0]).mean(0)", "torch.rand(30, 5, dtype=torch.float64)"),
    "counts": model(
        "return torch.bincount(a[0].flatten(), minlength=9)", "torch.randint(0, 9, (40, 3))"
    ),
    "norm_in_training": model(
        "return self.b(a[0])", "torch.rand(8, 5, 4, 4)", "5", "self.b = torch.nn.BatchNorm2d(n[0])"
    ),
    "logs": model("return torch.log(a[0]) - torch.sqrt(a[0])", "torch.rand(20, 30) + 0.1"),
    "chances": model(
        "return F.binary_cross_entropy(a[0], a[1])", "torch.rand(20, 30), torch.rand(20, 30)"
    ),
}


def new(body: str, made: str = "") -> str:
    """A candidate without inputs of its own."""
    return model(body, "", "", made, "ModelNew")


C_SOURCE = r"""
extern "C" void run(const float* x, const float* y, float* out, long rows, long columns) {
    for (long i = 0; i < rows; ++i) {
        float sum = 0;
        for (long j = 0; j < columns; ++j) sum += y[i * columns + j];
        for (long j = 0; j < columns; ++j) {
            const float v = x[i * columns + j];
            out[i * columns + j] = (v > 0 ? v : 0) * sum;
        }
    }
}
"""

# name -> reference, code
HONEST = {
    "the_references_own": ("usual", module(f"return {RIGHT}")),
    "may_wake_a_gpu": (  # which no child of a process that has asked for one can
        "usual",
        module(f"assert not torch._C._cuda_isInBadFork()\nreturn {RIGHT}"),
    ),
    "einsum": ("usual", module("return torch.einsum('ij,ik->ij', x.clamp(min=0), y)")),
    "row_by_row": (
        "usual",
        module("return torch.stack([torch.relu(a) * b.sum() for a, b in zip(x, y)])"),
    ),
    "wider_inside": (
        "usual",
        module("return (x.double().relu() * y.double().sum(-1, keepdim=True)).float()"),
    ),
    "in_place_inside": (
        "usual",
        module("out = x.clone().relu_()\nreturn out.mul_(y.sum(-1)[:, None])"),
    ),
    "workspace_inside": (
        "usual",
        module(
            "if getattr(self, 'room', torch.empty(0)).shape != y.shape[:1]:\n"
            "    self.room = torch.empty(y.shape[0], dtype=y.dtype)\n"
            "torch.sum(y, -1, out=self.room)\nreturn x.relu() * self.room[:, None]"
        ),
    ),
    "numpy": (
        "usual",
        module(
            "a, b = x.numpy(), y.numpy()\n"
            "return torch.from_numpy(numpy.maximum(a, 0) * b.sum(-1, keepdims=True))",
            "import numpy",
        ).replace("x.numpy(), y.numpy()", "x.float().numpy(), y.float().numpy()"),
    ),
    "autograd_function": (
        "usual",
        module(
            "return Both.apply(x, y)",
            "class Both(torch.autograd.Function):\n    @staticmethod\n"
            f"    def forward(ctx, x, y):\n        return {RIGHT}\n",
        ),
    ),
    "out_argument": (
        "usual",
        module("out = torch.empty_like(x)\nreturn torch.mul(x.relu(), y.sum(-1, True), out=out)"),
    ),
    "other_strides": ("usual", module(f"return ({RIGHT}).t().contiguous().t()")),
    "threads": (
        "usual",
        module(
            "with futures.ThreadPoolExecutor(2) as pool:\n"
            "    a, b = pool.map(lambda f: f(), (lambda: x.relu(), lambda: y.sum(-1, True)))\n"
            "return a * b",
            "from concurrent import futures",
        ),
    ),
    "vmap": (
        "usual",
        module("return torch.func.vmap(lambda a, b: torch.relu(a) * b.sum())(x, y)"),
    ),
    "talks_and_takes_its_time": (
        "usual",
        module(
            f"begun = time.perf_counter()\nout = {RIGHT}\n"
            "print('took', time.perf_counter() - begun)\nreturn out"
        ),
    ),
    "parameter": ("usual", module(f"return torch.nn.Parameter({RIGHT}, requires_grad=False)")),
    "c_by_ctypes": (
        "usual",
        module(
            "a, b = x.float().contiguous(), y.float().contiguous()\nout = torch.empty_like(a)\n"
            "words = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, out)]\n"
            "library.run(*words, ctypes.c_long(x.shape[0]), ctypes.c_long(x.shape[1]))\n"
            "return out.to(x.dtype)",
            "import subprocess\n"
            f"open('run.cpp', 'w').write({C_SOURCE!r})\n"
            "subprocess.run(['g++', '-shared', '-fPIC', '-O1', 'run.cpp', '-o', 'run.so'], check=True)\n"
            "library = ctypes.CDLL('./run.so')",
        )
        .replace("{{", "{")
        .replace("}}", "}"),
    ),
    "compiled": (
        "usual",
        module(
            "return work(x, y)",
            f"@torch.compile(backend='aot_eager')\ndef work(x, y):\n    return {RIGHT}\n",
        ),
    ),
    "linear_module": (
        "linear",
        new("return self.l(a[0]).relu_()", "self.l = torch.nn.Linear(n[0], 32)"),
    ),
    "linear_fused": (
        "linear",
        new(
            "return torch.addmm(self.l.bias, a[0], self.t).clamp_min_(0)",
            "self.l = torch.nn.Linear(n[0], 32); "
            "self.register_buffer('t', self.l.weight.detach().t().contiguous())",
        ),
    ),
    "linear_einsum": (
        "linear",
        new(
            "return F.relu(torch.einsum('ij,kj->ik', a[0], self.l.weight) + self.l.bias)",
            "self.l = torch.nn.Linear(n[0], 32)",
        ),
    ),
    "softmax_by_hand": (
        "softmax",
        new("e = torch.exp(a[0] - a[0].amax(-1, True))\nreturn e / e.sum(-1, keepdim=True)"),
    ),
    "softmax_by_logs": (
        "softmax",
        new("return torch.exp(a[0] - a[0].logsumexp(-1, keepdim=True))"),
    ),
    "layer_norm_by_hand": (
        "layer_norm",
        new(
            "c = a[0] - a[0].mean(-1, keepdim=True)\n"
            "return c * torch.rsqrt(c.square().mean(-1, keepdim=True) + 1e-5)"
        ),
    ),
    "layer_norm_by_squares": (
        "layer_norm",
        new(
            "m = a[0].mean(-1, keepdim=True)\n"
            "v = a[0].square().mean(-1, keepdim=True) - m * m\nreturn (a[0] - m) * torch.rsqrt(v + 1e-5)"
        ),
    ),
    "sum_one_after_another": (
        "long_sum",
        new("return torch.from_numpy(a[0].numpy().cumsum(-1)[..., -1].copy())"),
    ),
    "sum_backwards": ("long_sum", new("return a[0].flip(-1).cumsum(-1)[..., -1].clone()")),
    "sum_in_blocks": ("long_sum", new("return sum(b.sum(-1) for b in a[0].split(1000, -1))")),
    "convolution_by_columns": (
        "convolution",
        new(
            "x = a[0]\nc = F.unfold(x, 3)\nw = self.c.weight.flatten(1)\n"
            "out = w @ c + self.c.bias[:, None]\nreturn out.unflatten(-1, (x.shape[2] - 2, -1))",
            "self.c = torch.nn.Conv2d(n[0], n[1], 3)",
        ),
    ),
    "convolution_by_shifts": (
        "convolution",
        new(
            "x, w = a[0], self.c.weight\nh, v = x.shape[2] - 2, x.shape[3] - 2\nout = self.c.bias[:, None, None]\n"
            "for i in range(3):\n    for j in range(3):\n"
            "        out = out + torch.einsum('oc,nchw->nohw', w[:, :, i, j], x[:, :, i:i+h, j:j+v])\n"
            "return out",
            "self.c = torch.nn.Conv2d(n[0], n[1], 3)",
        ),
    ),
    "matmul_by_parts": (
        "matmul",
        new("x, y = a\nreturn sum(x[:, i:i+8] @ y[i:i+8] for i in range(0, 256, 8))"),
    ),
    "matmul_of_zeroed_triangles": ("triangle", new("return a[0].tril() @ a[1].tril()")),
    "index_select": ("gather", new("return a[0].index_select(0, a[1])")),
    "sort": (
        "top",
        new("v, i = a[0].sort(-1, descending=True)\nreturn v[:, :3].clone(), i[:, :3].clone()"),
    ),
    "half_by_einsum": ("half", new("return torch.einsum('ij,ij->i', a[0], a[1])")),
    "half_in_float": ("half", new("return (a[0].float() * a[1].float()).sum(-1).bfloat16()")),
    "changes_as_well": ("changes", new("a[0].add_(a[0].clone())\nreturn a[0].sum()")),
    "view_as_well": ("view", new("return a[0].flatten()")),
    "same_names": (
        "named",
        new("return {'twice': a[0] + a[0], 'size': a[0].shape[0], 'no': None}"),
    ),
    "plain_number": ("scalar", new("return a[1] * a[0]")),
    "doubles_too": ("doubles", new("return a[0].exp().sum(0) / a[0].shape[0]")),
    "counts_too": ("counts", new("return F.one_hot(a[0].flatten(), 9).sum(0)")),
    "norm_by_hand": (
        "norm_in_training",
        new(
            "x = a[0]\nm = x.mean((0, 2, 3), keepdim=True)\nv = x.var((0, 2, 3), keepdim=True, correction=0)\n"
            "return (x - m) / torch.sqrt(v + 1e-5)",
            "self.n = n",
        ),
    ),
    "logs_by_ratio": ("logs", new("return a[0].log2() * 0.6931471805599453 - a[0] ** 0.5")),
    "chances_by_hand": (
        "chances",
        new("p, y = a\nreturn -(y * p.log() + (1 - y) * torch.log1p(-p)).mean()"),
    ),
}

# They use what is for a CPU alone: numpy, pointers, memory made there.
FOR_THE_CPU = {"numpy", "c_by_ctypes", "sum_one_after_another", "workspace_inside"}

INLINE = module(
    "return extension.relu_times_sum(x, y)",
    '''
from torch.utils.cpp_extension import load_inline

extension = load_inline(
    "relu_times_sum",
    """
torch::Tensor relu_times_sum(torch::Tensor x, torch::Tensor y) {
    return torch::relu(x) * y.sum(-1, true);
}
""",
    functions="relu_times_sum",
)
''',
)
