"""Imports every architecture: that takes seconds once, and in each process that runs one longer than to run it."""

from tests.training.models import transformers_models

for _name in transformers_models.architectures():
    transformers_models.class_of(_name)
