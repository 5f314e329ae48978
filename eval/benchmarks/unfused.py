"""The unfused baseline: flat VQ aggregated in PyTorch, attention with our kernel."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers import AVQConfig
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.attention.triton import codewords as tables
from avq_diffusers.codebook.codebook import Codebook


def unfused_precompute(
    key: Tensor, value: Tensor, codewords: Tensor, bias: Tensor, *, one_hot: bool
) -> tuple[Tensor, Tensor]:
    """Flat VQ in plain PyTorch: assign each key to its nearest codeword, then average the values.

    Args:
        key, value: (B, H, N, D).
        codewords: (H, M, D), same dtype.
        bias: (H, 1, M) fp32, minus half the squared norms of the codewords.
        one_hot: multiply by one-hot assignments instead of scattering.

    Returns:
        means: (B, H, M, D), dtype of `value`, zero for codewords without keys.
        counts: (B, H, M) fp32.
    """
    num_codewords, head_dim = codewords.shape[1:]
    logits = (key @ codewords.transpose(1, 2)).float() + bias
    assignment = logits.argmax(-1)
    if one_hot:
        hot = assignment[..., None] == torch.arange(num_codewords, device=key.device)
        counts = hot.sum(2, dtype=torch.float32)
        sums = (hot.to(value.dtype).transpose(2, 3) @ value).float()
    else:
        counts = logits.new_zeros(*assignment.shape[:2], num_codewords)
        counts = counts.scatter_add(2, assignment, torch.ones_like(assignment, dtype=counts.dtype))
        sums = counts.new_zeros(*counts.shape, head_dim)
        sums = sums.scatter_add(2, assignment[..., None].expand_as(value), value.float())
    return (sums / counts.clamp(min=1)[..., None]).to(value.dtype), counts


def flat_sdpa(codebook: Codebook, query: Tensor, means: Tensor, counts: Tensor) -> Tensor:
    """Attention over means (B, H, M, D) and counts (B, H, M), without our kernel."""
    keys = codebook.parents.to(query.dtype).expand(len(query), -1, -1, -1)
    log_counts = counts.log().to(query.dtype)[:, :, None]
    return F.scaled_dot_product_attention(query, keys, means, attn_mask=log_counts)


def flat_kernel(
    config: AVQConfig, codebook: Codebook, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same with our kernel."""
    from avq_diffusers.attention.triton.attention import attention_launches
    from avq_diffusers.attention.triton.launch import Memory, Plan, Pointer, addresses_of
    from avq_diffusers.attention.triton.precompute import precompute_launches
    from avq_diffusers.attention.triton.problem import Given, Problem, given_by, readable

    scale = codebook.head_dim**-0.5
    stored = tables.pack(codebook.parents, codebook.children, scale=scale, dtype=dtype)
    spec = replace(config.spec, codewords="stored", num_updates=0)

    def attend(query: Tensor, means: Tensor, counts: Tensor) -> Tensor:
        tensors = readable(Tensors.of(query, query, query, scale=scale))
        problem = Problem.of(tensors, stored, None, spec)
        place = len(Given._fields)
        memory, given = Memory(place + 3), problem.pointers()
        first = precompute_launches(problem, given, memory)
        cells = first.arguments["CELLS"]
        # The kernel's rows: every parent, padding, then what stays with parents, unused here.
        rows, width = cells.ROWS, problem.padded_sizes[0]
        further = 0, width - means.shape[3], 0, rows - means.shape[2]
        means = F.pad(means.to(dtype), further).contiguous()
        counts = F.pad(counts, (0, rows - counts.shape[2])).contiguous()
        numbers = means, counts.int(), counts.log2()
        own = {
            "mean_values": Pointer(place, dtype),
            "counts": Pointer(place + 1, torch.int32),
            "log_counts": Pointer(place + 2, torch.float32),
        }
        own_tables = first.arguments["tables"]._replace(**own)
        first = first._replace(arguments=first.arguments | {"tables": own_tables})
        plan = Plan(memory, attention_launches(problem, given, first, memory))
        output = torch.empty_like(query.transpose(1, 2).contiguous())
        shown = query.new_empty((*query.shape[:2], problem.num_tiles, 2), dtype=torch.int32)
        addresses = *given_by(tensors, stored, None, output, shown), *addresses_of(*numbers)
        plan.run(addresses, query.device)
        return output.transpose(1, 2)

    return attend
