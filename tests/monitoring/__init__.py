"""What the docs give to Prometheus and Grafana, before a real Prometheus."""
