"""One microbatch on fake tensors: operations, memory, and what each part keeps."""
