r"""A page on which the graphs of a model can be looked at.

.. code-block:: python

    model.eval()
    with torch.no_grad():
        _, trace = model(data, return_trace=True)
    trace.view(data, 'graph.html')  # one file, which needs no network
    trace.save(data, 'run.pt')  # python -m torch_geometric_idgl.view run.pt
"""

from .graph_view import GraphView

__all__ = ['GraphView']
