"""rdma, the arms: staging adapters from a weight peer."""
