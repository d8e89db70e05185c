"""Ops that torch computes in another way while any dispatch mode is on, so that their last bits may differ.

A kernel that calls other ops does so under the user's autocast; called from a dispatch mode, autocast is off for it.
A few backward formulas and decompositions take another branch when a mode is on (`isTensorSubclassLike` in torch's C++
code). Found by running torch's own database of ops with and without a mode, 14,212 calls, bit by bit (torch 2.13). A
training that has one of them in its model is never counted as it runs.
"""

RISKY = frozenset(
    f"aten::{name}"
    for name in (
        "_linalg_det",
        "_scaled_grouped_mm_v2",
        "_scaled_mm_v2",
        "_linalg_eigh",
        "_linalg_svd",
        "_native_multi_head_attention",
        "_sparse_addmm",
        "_sparse_mm",
        "_sparse_sparse_matmul",
        "_transformer_encoder_layer_fwd",
        "_trilinear",
        "affine_grid_generator",
        "cumprod",
        "linalg_inv_ex",
        "linalg_lstsq",
        "linalg_pinv",
        "prod",
    )
)
