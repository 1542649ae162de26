from __future__ import annotations

import json
from typing import Any


def get_progress(self: Any, local_or_global: str) -> tuple[int, int]:
    name = self.config.neuron.global_model_name
    bucket = name if local_or_global == "global" else self.config.r2.bucket_name
    found = self.r2[local_or_global].get_object(Bucket=bucket, Key="metadata.json")
    metadata = json.loads(found["Body"].read())
    return metadata["outer_step"], metadata["inner_step"]
