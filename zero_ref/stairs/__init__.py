"""Five whole optimizers, each with one idea more: `owners`, `buckets`, `shards`, `overlap`, `checkpoint`."""
