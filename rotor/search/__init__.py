"""From a goal to the plan that meets it: probes, the measured table, the choice."""
