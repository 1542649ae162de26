"""The guard's outputs: report, bundle, export, metrics, alerts. This package reads only stored data
and sends no requests to the guard."""
