"""Makes a small text classifier with its tokenizer, and saves it as Hugging Face's models are."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils import logging

FOLDER = Path("models/sentiment/1/network")
PRAISE, BLAME = ("good", "great", "lovely", "fine"), ("bad", "awful", "dull", "poor")
SUBJECTS = ("the book", "the film", "this song", "the food", "a play")
TEXTS = [f"{thing} is {word}" for thing in SUBJECTS for word in (*PRAISE, *BLAME)]
LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1] * len(SUBJECTS))

special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
words = sorted({word for text in TEXTS for word in text.split()})
vocabulary = {word: number for number, word in enumerate([*special, *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
tokenizer.normalizer = normalizers.Lowercase()
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
)

torch.manual_seed(1)
config = BertConfig(
    vocab_size=len(vocabulary),
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
    id2label={0: "praise", 1: "blame"},
    label2id={"praise": 0, "blame": 1},
)
network = BertForSequenceClassification(config)
optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
inputs = fast(TEXTS, padding=True, return_tensors="pt")
for _ in range(60):
    optimizer.zero_grad()
    loss = network(**inputs, labels=LABELS).loss
    loss.backward()
    optimizer.step()

logging.disable_progress_bar()
network.eval().save_pretrained(FOLDER)
fast.save_pretrained(FOLDER)
count = sum(weight.numel() for weight in network.parameters())
print(f"{count} weights, {loss.item():.1f} loss")
