"""Times fp16 scaled-dot-product attention of PyTorch on the shapes of bench.cu: lines `batch tokens milliseconds`."""

import sys

try:
    import torch
except ImportError:
    sys.exit("PyTorch is not installed")
if not torch.cuda.is_available():
    sys.exit("PyTorch sees no CUDA GPU")


def milliseconds(run):
    best = float("inf")
    for i in range(12):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        if i >= 2:
            best = min(best, start.elapsed_time(stop))
    return best


for batch in (1, 8):
    tokens = 2048
    while tokens <= 262144:
        q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.float16)
        k, v = (torch.randn(batch, 8, tokens, 128, device="cuda", dtype=torch.float16) for _ in range(2))
        # One query token that reads heads of a group as query rows: the form in which the heads share keys.
        folded = q.reshape(batch, 8, 4, 128)
        times = [milliseconds(lambda: torch.nn.functional.scaled_dot_product_attention(folded, k, v))]
        try:
            times.append(milliseconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)))
        except (TypeError, RuntimeError):
            pass
        print(batch, tokens, f"{min(times):.4f}")
        tokens *= 2
