"""Batches: real text from every source, deterministic, and errors that name the place."""

import json
import sys

import pytest
import torch

from streambp.bench import documents
from streambp.bench.config import DataConfig, DeviceConfig
from streambp.bench.data import batches
from streambp.bench.documents import documents_of
from streambp.bench.preflight import resolve
from streambp.bench.tokenizers import ByteTokenizer

TEXT = "Chunk by chunk, the gradient comes back.\n" * 50


def take(cfg, num=2, *, vocab_size=300, batch_size=2, seq_len=32, seed=0):
    source = batches(cfg, vocab_size=vocab_size, batch_size=batch_size, seq_len=seq_len, seed=seed)
    return [next(source) for _ in range(num)]


def file_cfg(path, **changes):
    return DataConfig(name="file", path=str(path), **changes)


@pytest.mark.parametrize("name", ["corpus", "random"])
def test_shapes_determinism_and_the_seed(name):
    cfg = DataConfig(name=name)
    first, again, other = take(cfg, seed=1), take(cfg, seed=1), take(cfg, seed=2)
    for batch in first:
        assert batch["input_ids"].shape == batch["labels"].shape == (2, 32)
        assert batch["input_ids"].dtype == torch.int64
        assert batch["input_ids"].equal(batch["labels"])
        assert batch["input_ids"].max() < 300
    assert all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(first, again, strict=True))
    assert not first[0]["input_ids"].equal(other[0]["input_ids"])
    assert not first[0]["input_ids"].equal(first[1]["input_ids"])


def test_the_corpus_is_python_source_text():
    (batch,) = take(DataConfig(name="corpus"), 1, batch_size=1, seq_len=50_000)
    text = ByteTokenizer().decode(batch["input_ids"][0])
    assert "def " in text and "import " in text


def test_packing_keeps_every_token_in_order(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    rows = torch.cat([batch["input_ids"].flatten() for batch in take(file_cfg(file), 40)])
    one = ByteTokenizer().encode(TEXT)
    assert rows.equal(one.repeat(len(rows) // len(one) + 1)[: len(rows)])


def test_byte_tokenizer_round_trip():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("naïve – 漢")
    assert ids[0] == tokenizer.BOS and ids[-1] == tokenizer.EOS
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == "naïve – 漢"
    assert tokenizer.encode("").tolist() == [tokenizer.BOS, tokenizer.EOS]


def test_large_files_come_in_pieces_that_end_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_PIECE_BYTES", 100)
    file = tmp_path / "a.txt"
    file.write_text(TEXT + "last line without an end ä")
    pieces = list(documents_of(file_cfg(file)))
    assert len(pieces) > 10
    assert "".join(pieces) == file.read_text()
    assert all(piece.endswith("\n") for piece in pieces[:-1])


def test_jsonl_and_folder_and_saved_dataset_give_the_same_documents(tmp_path):
    texts = ["first", "second\nline", "third"]
    lines = "\n\n".join(json.dumps({"body": text, "n": 1}) for text in texts)
    (tmp_path / "a.jsonl").write_text(lines + "\n")
    folder = tmp_path / "folder" / "inner"
    folder.mkdir(parents=True)
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    (folder / "notes.pdf").write_bytes(b"\xff")
    assert list(documents_of(file_cfg(tmp_path / "a.jsonl", text_field="body"))) == texts
    assert list(documents_of(file_cfg(tmp_path / "folder"))) == texts

    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"body": texts})
    dataset.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=dataset).save_to_disk(str(tmp_path / "splits"))
    for name in ("saved", "splits"):
        assert list(documents_of(file_cfg(tmp_path / name, text_field="body"))) == texts
    with pytest.raises(ValueError, match=r"data\.text_field='text'.*body"):
        documents_of(file_cfg(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"line 3 has no key 'text', it has 'body': set data\.text_field"),
        ('{"text": 4}', r"line 3: 'text' holds int, not text"),
        ('["text"]', r"line 3 is no JSON object"),
        ('{"text": ', r"line 3 is not JSON"),
    ],
)
def test_bad_jsonl_names_the_line_and_the_key(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=message):
        take(file_cfg(file))


def test_too_little_text_says_how_much_is_needed(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("short")
    with pytest.raises(ValueError, match=r"7 tokens.*batch_size=2 x seq_len=32 = 64 tokens"):
        take(file_cfg(file))
    file.write_text("")
    with pytest.raises(ValueError, match=r"0 tokens"):
        take(file_cfg(file))


def test_vocabulary_too_small_for_the_tokenizer():
    with pytest.raises(ValueError, match=r"259 ids exceed the model's vocabulary of 256"):
        take(DataConfig(name="corpus"), vocab_size=256)


def test_file_that_is_no_text(tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(b"ab\xff" * 100)
    with pytest.raises(ValueError, match=r"no UTF-8 text \(byte 2\)"):
        take(file_cfg(file))


def test_folder_without_text(tmp_path):
    with pytest.raises(ValueError, match="neither a dataset"):
        take(file_cfg(tmp_path))


def test_saved_dataset_without_the_package(tmp_path, monkeypatch):
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        take(file_cfg(tmp_path))


def test_huggingface_tokenizer_from_a_folder(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", "chunk", "by"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(tmp_path / "tokenizer")
    file = tmp_path / "a.txt"
    file.write_text("chunk by chunk " * 20)
    cfg = file_cfg(file, tokenizer=str(tmp_path / "tokenizer"))
    (batch,) = take(cfg, 1, vocab_size=4, batch_size=1, seq_len=61)
    assert batch["input_ids"].tolist() == [[2, 3, 2] * 20 + [1]]
    with pytest.raises(ValueError, match=r"its 4 ids exceed the model's vocabulary of 3"):
        take(cfg, vocab_size=3)


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"data\.tokenizer=.*holds no tokenizer"):
        take(DataConfig(name="corpus", tokenizer=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"data\.path=.*at most 0 tokens.*Fix: more text"),
        ("a.txt", b"short", r"data\.path=.*at most 7 tokens.*seq_len=64"),
        ("a.txt", b"ab\xff" * 100, r"data\.path: .*no UTF-8 text \(byte 2\)"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", b'{"body": "a"}\n' * 9, r"line 1 has no key 'text'.*set data\.text_field"),
        ("a.pdf.d/a.pdf", b"%PDF", "neither a dataset"),
        ("d/dataset_info.json", b'{"features": {"body": {}}}', r"data\.text_field='text'.*=body"),
        ("a.txt", b"long enough " * 9, None),
        ("a.jsonl", b'{"text": "long enough"}\n' * 9, None),
    ],
)
def test_what_is_wrong_with_data_is_found_before_a_worker_starts(
    make_config, tmp_path, name, content, message
):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    if file.parent.name == "d":
        (file.parent / "state.json").write_text("{}")
    path = file.parent if file.parent != tmp_path else file
    config = make_config(data={"name": "file", "path": str(path)}, seq_len=64)
    if message is None:
        resolve(config)
        return
    with pytest.raises(ValueError, match=message):
        resolve(config)
    resolve(config.replace(device=DeviceConfig(name="simulated")))  # it reads none


def test_bytes_need_a_vocabulary_of_their_size(make_config):
    model = {"name": "tiny", "config": {"model_type": "qwen3", "vocab_size": 256}}
    with pytest.raises(ValueError, match=r"data\.tokenizer=.*vocabulary of 256"):
        resolve(make_config(model=model))
    resolve(make_config(model=model, data={"name": "random"}))
