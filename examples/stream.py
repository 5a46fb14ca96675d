"""An answer while it comes, with [brackets] around what the drafter had guessed."""

from draftwood import LLM, SamplingParams

QUESTION = "Repeat this sentence three times: The quick brown fox jumps over the lazy dog."

with LLM("smollm2", drafter="ngram:nodes=8") as llm:
    text = ""
    guessed = 0
    for event in llm.stream([{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=48)):
        for piece, accepted in event.pieces:
            print(f"[{piece}]" if accepted else piece, end="", flush=True)
        text += event.text
        guessed += sum(event.accepted)
    print(f"\n\n{event.stats.num_tokens} tokens in {event.stats.steps} steps, {guessed} of them guessed")

    # Leaving the loop early cancels the request; nothing keeps running behind your back.
    for _ in llm.stream("Once upon a time", SamplingParams(max_tokens=200)):
        break

assert "fox" in text
assert guessed == event.stats.accepted > 0
assert event.stats.steps < event.stats.num_tokens
