"""What a request takes of a pool while it runs, at worst: slots, prompt tokens, KV tokens."""

from app.contracts.placement import Demand
from app.contracts.request import RequestFacts


def demand(facts: RequestFacts, max_model_len: int) -> Demand:
    """One slot a sequence; each sequence may grow to its prompt and all the output it may have.

    An output without a bound, or a prompt whose length is only known from above, ends with the
    context of `max_model_len` tokens.
    """
    prompts_high = min(facts.prompt_tokens.high, facts.prompts * max_model_len)
    output = max_model_len if facts.max_output_tokens is None else facts.max_output_tokens
    each = min(max_model_len, -(-prompts_high // facts.prompts) + output)
    return Demand(facts.sequences, prompts_high, facts.sequences * each, facts.prompts)
