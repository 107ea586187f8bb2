"""spikeopd-serve: an OpenAI-compatible server on the event engine, and a page on which its spikes are seen. No torch.

scheduler  continuous batching: one thread that feeds blocks of lanes, a bounded queue in front
protocol   requests and answers in OpenAI's form, checked, with events and energy beside the tokens
spikes     what the page draws of one token
metrics    Prometheus' text format
app        the routes and their guards (Starlette)
"""
