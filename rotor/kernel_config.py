"""kernel_config.json: what the kernels need to know of a compressed model, decided offline."""

from __future__ import annotations

from typing import Any

from .kernels.schedule import balanced_row_blocks, work_per_key
from .layout import AttentionShape, LayerLayout

VERSION = 1
SCHEDULE = "stream"


def kernel_config(layouts: list[LayerLayout], shape: AttentionShape) -> dict[str, Any]:
    """The configuration of all layers.

    Per layer and group: its KV heads, ranks, offsets (in elements) in the packed key and value rows, and class. Per
    class: the prefill's row and column blocks, balanced over the layer. `specialisations` lists what to compile.

    Source: FDC section 5.3 for the balance; docs/design.md for the file.
    """
    layers = []
    specialisations = set()
    for index, layout in enumerate(layouts):
        classes = list(layout.classes())
        blocks = balanced_row_blocks([(c.qk_rank, c.v_rank) for c in classes])
        group_class = [i for i, c in enumerate(classes) for _ in range(c.count)]
        layers.append(
            {
                "layer": index,
                "domain": layout.domain,
                "group_size": layout.group_size,
                "qk_width": layout.qk_width,
                "v_width": layout.v_width,
                "groups": [
                    {
                        "kv_heads": list(group.kv_heads),
                        "qk_rank": group.qk_rank,
                        "v_rank": group.v_rank,
                        "qk_offset": offsets[0],
                        "v_offset": offsets[1],
                        "class": group_class[i],
                    }
                    for i, (group, offsets) in enumerate(zip(layout.groups, layout.offsets(), strict=True))
                ],
                "classes": [
                    {
                        "qk_rank": c.qk_rank,
                        "v_rank": c.v_rank,
                        "groups": c.count,
                        "d_sum": work_per_key(c.qk_rank, c.v_rank),
                        "B_r": row_block,
                        "B_c": column_block,
                    }
                    for c, (row_block, column_block) in zip(classes, blocks, strict=True)
                ],
            }
        )
        specialisations |= {(layout.domain, layout.group_size, c.qk_rank, c.v_rank) for c in classes}
    return {
        "version": VERSION,
        "head_dim": shape.head_dim,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "schedule": SCHEDULE,
        "layers": layers,
        "specialisations": [
            {
                "domain": domain,
                "group_size": size,
                "query_rows": size * shape.heads_per_kv,
                "qk_rank": qk_rank,
                "v_rank": v_rank,
            }
            for domain, size, qk_rank, v_rank in sorted(specialisations)
        ],
    }
