"""From a call to launches: struct Params, layouts, grids, workspaces and plans."""
