"""Many requests on one event loop: they share a batch, and each can be cancelled on its own."""

import asyncio

from draftwood import LLM, Result, SamplingParams

PROMPTS = ["Roses are red,", "Once upon a time", "The three primary colours are"]


async def read_some(llm: LLM, prompt: str, num_characters: int) -> str:
    """Read a stream until it has said enough; leaving the loop cancels the rest."""
    text = ""
    events = llm.astream(prompt, SamplingParams(max_tokens=500))
    async for event in events:
        text += event.text
        if len(text) >= num_characters:
            break
    await events.aclose()  # at once, not when the garbage collector comes by
    return text


async def main() -> None:
    with LLM("smollm2", drafter="ngram") as llm:
        params = SamplingParams(max_tokens=16)
        *results, beginning = await asyncio.gather(
            *(llm.agenerate(prompt, params) for prompt in PROMPTS),
            read_some(llm, "A long story:", 40),
        )
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert isinstance(result, Result)
            assert result.stats.num_tokens <= 16
            print(f"{prompt!r} -> {result.text!r}")
        print(f"first words of a cancelled story: {beginning!r}")
        assert len(beginning) >= 40

        task = asyncio.create_task(llm.agenerate("Never finished", SamplingParams(max_tokens=2000)))
        await asyncio.sleep(0.2)
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        after = await llm.agenerate("Still here:", SamplingParams(max_tokens=4))
        assert after.token_ids


asyncio.run(main())
