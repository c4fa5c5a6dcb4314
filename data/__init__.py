"""Bundled inputs, committed records and the claims ledger, importable as `depthlab.bundles`."""
