"""Packs inside this package, by name: the SHA-256 of each one's index, which names every byte of it but signatures.

Written by ``python -m benchmarks.prebuilt_packs`` beside the files in ``torch_autokern/packs/``. A shipped pack is as trusted
as this file is: it came by the same way.
"""

SHIPPED: dict[str, str] = {
    "sm90a": "78dae6e22df7ae19e94f947818b38c66328dc9f3d9b1b96d5fdc27b64c6c52d3",
}
