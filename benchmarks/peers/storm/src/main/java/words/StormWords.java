package words;

import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.storm.Config;
import org.apache.storm.LocalCluster;
import org.apache.storm.kafka.spout.FirstPollOffsetStrategy;
import org.apache.storm.kafka.spout.KafkaSpout;
import org.apache.storm.kafka.spout.KafkaSpoutConfig;
import org.apache.storm.task.TopologyContext;
import org.apache.storm.topology.BasicOutputCollector;
import org.apache.storm.topology.OutputFieldsDeclarer;
import org.apache.storm.topology.TopologyBuilder;
import org.apache.storm.topology.base.BaseBasicBolt;
import org.apache.storm.tuple.Fields;
import org.apache.storm.tuple.Tuple;
import org.apache.storm.tuple.Values;

/**
 * The word count of benchmarks.core in Storm's local mode: a Kafka spout, a bolt that splits, a bolt that counts, and
 * acking. Prints one line of JSON. The clock runs from the first acked message to the last.
 *
 * <p>Arguments: bootstrap servers, topic, number of messages, ackers.
 */
public final class StormWords {
    private static final AtomicLong ACKED = new AtomicLong();
    private static final AtomicLong FAILED = new AtomicLong();
    private static final AtomicLong COUNTED = new AtomicLong();

    /** Counts what its messages' trees came to. */
    public static final class Lines extends KafkaSpout<String, String> {
        public Lines(KafkaSpoutConfig<String, String> config) {
            super(config);
        }

        @Override
        public void ack(Object id) {
            super.ack(id);
            ACKED.incrementAndGet();
        }

        @Override
        public void fail(Object id) {
            super.fail(id);
            FAILED.incrementAndGet();
        }
    }

    public static final class Split extends BaseBasicBolt {
        @Override
        public void execute(Tuple tuple, BasicOutputCollector collector) {
            for (String word : tuple.getStringByField("value").split(" ")) {
                collector.emit(new Values(word));
            }
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer declarer) {
            declarer.declare(new Fields("word"));
        }
    }

    public static final class Count extends BaseBasicBolt {
        private transient Map<String, Long> counts;

        @Override
        public void prepare(Map<String, Object> conf, TopologyContext context) {
            counts = new HashMap<>();
        }

        @Override
        public void execute(Tuple tuple, BasicOutputCollector collector) {
            counts.merge(tuple.getStringByField("word"), 1L, Long::sum);
            COUNTED.incrementAndGet();
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer declarer) {}
    }

    public static void main(String[] arguments) throws Exception {
        long messages = Long.parseLong(arguments[2]);
        KafkaSpoutConfig<String, String> source = KafkaSpoutConfig.builder(arguments[0], arguments[1])
            .setProp("group.id", "storm-words-" + System.nanoTime())
            .setFirstPollOffsetStrategy(FirstPollOffsetStrategy.EARLIEST)
            .setProcessingGuarantee(KafkaSpoutConfig.ProcessingGuarantee.AT_LEAST_ONCE)
            .build();
        TopologyBuilder builder = new TopologyBuilder();
        builder.setSpout("lines", new Lines(source), 2);
        builder.setBolt("split", new Split(), 2).shuffleGrouping("lines");
        builder.setBolt("count", new Count(), 2).fieldsGrouping("split", new Fields("word"));
        Config config = new Config();
        config.setNumWorkers(1);
        config.setNumAckers(Integer.parseInt(arguments[3]));
        config.setMaxSpoutPending(10_000);
        OperatingSystemMXBean system = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        LocalCluster cluster = new LocalCluster();
        cluster.submitTopology("words", config, builder.createTopology());
        long deadline = System.nanoTime() + TimeUnit.MINUTES.toNanos(5);
        while (ACKED.get() == 0 && System.nanoTime() < deadline) {
            Thread.sleep(1);
        }
        long first = ACKED.get();
        long began = System.nanoTime();
        long cpu = system.getProcessCpuTime();
        while (ACKED.get() < messages && System.nanoTime() < deadline) {
            Thread.sleep(1);
        }
        double seconds = (System.nanoTime() - began) / 1e9;
        double micros = (system.getProcessCpuTime() - cpu) / 1e3;
        long done = ACKED.get() - first;
        System.out.printf(
            "{\"messages_per_s\": %.0f, \"cpu_us_per_message\": %.1f, \"acked\": %d, \"failed\": %d, \"words\": %d}%n",
            done / seconds, micros / done, ACKED.get(), FAILED.get(), COUNTED.get());
        System.out.flush();
        Runtime.getRuntime().halt(ACKED.get() < messages ? 1 : 0); // the local cluster takes its time to end
    }
}
