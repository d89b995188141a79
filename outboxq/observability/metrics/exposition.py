"""The exposition: converts readings into the text format of Prometheus, by prometheus_client."""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from outboxq.errors import ConfigError
from outboxq.observability.metrics.families import FAMILIES, Family
from outboxq.observability.metrics.reading import Buckets, Labels, Reading
from outboxq.statements.history import BOUNDS

try:
    from prometheus_client import CollectorRegistry, exposition
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError("metrics need prometheus-client: pip install 'outboxq[metrics]'") from error

_UPPER = (*(f"{bound:g}" if bound != int(bound) else f"{bound:.1f}" for bound in BOUNDS), "+Inf")
_PLAIN = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class ReadingCollector(Collector):
    """Makes prometheus_client's metrics from readings, at each scrape and never in between.

    Args:
        read: Returns the present reading of each database, by the database's name.
    """

    def __init__(self, read: Callable[[], Mapping[str, Reading]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Return nothing: a registry calls this at the collector's registration, which must not read the databases."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric that has a series in one of the databases."""
        readings = self._read()
        for name, family in FAMILIES.items():
            values = [(database, reading.values.get(name, {})) for database, reading in readings.items()]
            buckets = [(database, reading.histograms.get(name, {})) for database, reading in readings.items()]
            if family.type == "histogram":
                yield from _histogram(family, buckets)
            else:
                yield from _values(family, values)


def _values(family: Family, found: list[tuple[str, dict[Labels, float]]]) -> Iterator[Metric]:
    metric = _PLAIN[family.type](family.name, family.help, labels=("database", *family.labels))
    for database, series in found:
        for labels, value in sorted(series.items()):
            metric.add_metric((database, *labels), value)
    if metric.samples:
        yield metric


def _histogram(family: Family, found: list[tuple[str, dict[Labels, Buckets]]]) -> Iterator[Metric]:
    metric = HistogramMetricFamily(family.name, family.help, labels=("database", *family.labels))
    for database, series in found:
        for labels, (counts, micros) in sorted(series.items()):
            metric.add_metric((database, *labels), list(zip(_UPPER, accumulate(counts), strict=True)), micros / 1e6)
    if metric.samples:
        yield metric


def registry_of(read: Callable[[], Mapping[str, Reading]]) -> CollectorRegistry:
    """Return a registry of prometheus_client that contains only the metrics of the readings that `read` returns."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReadingCollector(read))
    return registry


def expose(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Return the answer to a scrape, in the format that its header `Accept` prefers, and the format's name."""
    encode, content_type = exposition.choose_encoder(accept)
    return encode(registry), content_type
