"""Secrets in the arguments of a training are hidden, and ordinary arguments are not."""

import pytest

from flopwatch.records.what_ran import HIDDEN, mask_arguments

SECRET = "Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZg"
DIGITS = "0123456789abcdef0123456789abcdef01234567"

SECRETS = [
    [f"--api-key={SECRET}"],
    ["--api_key", SECRET],
    ["--apikey", SECRET],
    [f"--wandb.apiKey={SECRET}"],
    ["--token", SECRET],
    [f"--hf-token={SECRET}"],
    ["--use_auth_token", SECRET],
    ["--password", SECRET],
    [f"--db-password={SECRET} with spaces"],
    ["--secret", SECRET],
    [f"--aws_secret_access_key={SECRET}"],
    ["--key", SECRET],
    ["-key", SECRET],
    [f"WANDB_API_KEY={DIGITS}"],
    [f"+logger.wandb.api_key={DIGITS}"],
    [f"++credentials={SECRET}"],
    [f"hf_{SECRET}"],
    [f"--model=hf_{SECRET}"],
    [f"sk-{SECRET}"],
    [f"--header=sk-proj-{SECRET}"],
    [f"ghp_{SECRET}"],
    [f"github_pat_{SECRET}"],
    [f"xoxb-{SECRET}"],
    ["AKIAIOSFODNN7EXAMPLE"],
    ["--account", "AKIAIOSFODNN7EXAMPLE"],
    [f"AIza{SECRET}"],
    [f"eyJhbGciOiJIUzI1NiJ9.{SECRET}.{SECRET}"],
    [f"https://me:{SECRET}@host/data"],
    [f"--data=s3://{SECRET}:{SECRET}@bucket/x"],
    [f"https://host/data?token={SECRET}&page=2"],
    [f'{{"api_key": "{SECRET}", "lr": 3}}'],
    [f"Authorization: Bearer {SECRET}"],
    ["--header", f"X-Api-Key: {SECRET}"],
    [f"--env=WANDB_API_KEY={SECRET}"],
    [f"https://hooks.slack.com/services/T0/B0/{SECRET}"],
]
ORDINARY = [
    ["--tokenizer", "gpt2"],
    ["--tokenizer=hf-internal-testing/llama-tokenizer"],
    ["--max-tokens", "512"],
    ["--num_tokens=5"],
    ["--tokens-per-batch", "4096"],
    ["--pad-token", "<pad>"],
    ["--eos_token=</s>"],
    ["--token_id", "3"],
    ["--text-key", "content"],
    ["--num_key_value_heads=8"],
    ["--sort-key=length"],
    ["--lr=3e-4", "--seed", "-1"],
    ["--author", "someone"],
    ["model.hidden_size=512", "data.path=/data/a=b"],
    ["--config", "configs/secretary/passwords_dataset.yaml"],
    ["--dataset", "HuggingFaceFW/fineweb"],
    ["--url", "https://huggingface.co/gpt2"],
    ["--master-addr=10.0.0.1:29500"],
    ["--out", "s3://bucket/runs/2026-11-18"],
    ["--monkey", "3"],
    ['{"lr": 0.1, "betas": [0.9, 0.95]}'],
    ["--password", "--verbose"],
    ["sk-learn", "hf_model"],
]


@pytest.mark.parametrize("arguments", SECRETS, ids=" ".join)
def test_a_secret_is_hidden(arguments):
    masked = " ".join(mask_arguments(["--lr", "3", *arguments, "--out", "runs"]))
    assert HIDDEN in masked
    for secret in (SECRET, DIGITS, "AKIAIOSFODNN7EXAMPLE", "with spaces"):
        assert secret not in masked
    assert masked.startswith("--lr 3 ")
    assert masked.endswith(" --out runs")


@pytest.mark.parametrize("arguments", ORDINARY, ids=" ".join)
def test_an_ordinary_argument_is_kept(arguments):
    assert mask_arguments(arguments) == arguments
