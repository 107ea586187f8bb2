"""Text in pieces: what is given is the text itself, up to the first stop string, whatever the pieces are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from neuro_sim.text import Pieces, Text

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_text() -> Text:
    """Every byte is a token, so characters span several."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Text(tokenizer)


TEXT = byte_text()


@settings(max_examples=60, deadline=None)
@given(
    st.text(alphabet="ab é€😀\n", max_size=30), st.lists(st.text("ab é€", min_size=1, max_size=3), max_size=3),
    st.integers(1, 7),
)  # fmt: skip
def test_pieces_are_the_text_up_to_the_first_stop(whole: str, stop: list[str], stride: int) -> None:
    tokens = TEXT.encode(whole)
    pieces = Pieces(TEXT, stop)
    given = [pieces.next(tokens[:end]) for end in range(stride, len(tokens), stride)]
    given.append(pieces.next(tokens, final=True))
    ends = [(whole.find(one) + len(one), whole.find(one)) for one in stop if one in whole]
    assert "".join(given) == (whole[: min(ends)[1]] if ends else whole)
    assert pieces.stopped == bool(ends)


def test_the_beginning_of_a_stop_string_waits() -> None:
    tokens, pieces = TEXT.encode("one END"), Pieces(TEXT, ["END!"])
    assert pieces.next(tokens[:5]) == "one E"[:4] and pieces.next(tokens) == "" and pieces.held == "END"
    assert pieces.next(TEXT.encode("one ENDS")) == "ENDS" and not pieces.stopped
    assert pieces.next(TEXT.encode("one ENDS END!"), final=True) == " " and pieces.stopped


def test_bytes_that_are_no_text_come_at_the_end() -> None:
    half = TEXT.encode("é")[:1]
    pieces = Pieces(TEXT)
    assert pieces.next(half) == "" and pieces.next(half, final=True) == "\N{REPLACEMENT CHARACTER}"
