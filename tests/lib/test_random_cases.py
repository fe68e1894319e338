"""A search over random models, batches and settings for a gradient that is not exact."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from libtools import VOCABULARY, batch_of, build, compare

CASES = 240

HEADS = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 1), (3, 3), (6, 2)]


@st.composite
def cases(draw):
    """(model fields, batch, upstream scale, settings), all that exactness may depend on."""
    length = draw(st.integers(1, 40))
    batch_size = draw(st.integers(1, 3))
    heads, kv_heads = draw(st.sampled_from(HEADS))
    family = draw(st.sampled_from(["qwen3", "llama", "qwen2", "mistral", "gemma3"]))
    fields = {
        "family": family,
        "seed": draw(st.integers(0, 1000)),
        "hidden_size": 24 if heads % 3 == 0 else 16,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family in ("mistral", "gemma3"):
        fields["sliding_window"] = draw(st.integers(1, 45))
    batch = batch_of(
        batch_size,
        length,
        seed=draw(st.integers(0, 1000)),
        padding=draw(st.sampled_from(["none", "left", "right"])),
        ignored=draw(st.sampled_from([0.0, 0.3, 0.9, 1.1])),
        mask_pads=draw(st.booleans()),
    )
    kind = draw(st.sampled_from(["plain", "plain", "positions", "packed", "shifted", "dense"]))
    if kind == "positions":
        batch["position_ids"] = torch.arange(length)[None] + draw(st.integers(0, 20))
    elif kind == "packed":
        batch.pop("attention_mask", None)
        batch["position_ids"] = packed(draw, batch_size, length)
        batch["use_cache"] = False
    elif kind == "shifted":
        batch["shift_labels"] = torch.randint(0, VOCABULARY, (batch_size, length))
    elif kind == "dense":
        holes = torch.rand(batch_size, 1, length, length) < draw(st.sampled_from([0.2, 0.8]))
        batch["attention_mask"] = (holes | torch.eye(length, dtype=torch.bool)).tril()
    if draw(st.booleans()):
        batch["num_items_in_batch"] = draw(st.integers(1, 50))
    options = {
        "chunk_size": draw(st.integers(1, 45)),
        "head_chunk_size": draw(st.integers(1, 130)),
        "keep_kv": draw(st.booleans()),
        "keep_attention": draw(st.booleans()),
        "recompute_head": draw(st.booleans()),
    }
    upstream = draw(st.sampled_from([1.0, -1.0, 0.125, 300.0]))
    return fields, batch, upstream, options


def packed(draw, batch_size, length):
    rows = []
    for _ in range(batch_size):
        cuts = draw(st.lists(st.integers(1, length), max_size=4))
        starts = torch.tensor([0, *sorted(set(cuts) - {length})])
        index = torch.arange(length)
        rows.append(index - starts[torch.searchsorted(starts, index, right=True) - 1])
    return torch.stack(rows)


@settings(
    max_examples=CASES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(cases())
def test_random_cases(case):
    torch.manual_seed(0)
    fields, batch, upstream, options = case
    compare(build(**fields), batch, upstream=upstream, **options)
